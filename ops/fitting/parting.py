"""Whether a running training can make more micro-batches, asked when it first wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..step.out_of_memory import is_out_of_memory
from .loop import Loop
from .shares import NO_RULE, rule_of, rules_of

__all__ = ["Parting"]


class Parting:
    """The numbers of micro-batches that a running training can take.

    A search compares gradients of parts with that of the batch only when it looks at parts,
    and a choice that is given is not searched for. Where nobody has compared them yet, the sample
    is held to do it with, as the plan of a step holds it too.

    Args:
        loop: that trains; its rule becomes that by which the losses add up.
        counts: the numbers of parts that the sample can be cut into, 1 or the loop's own first.
        sample: the batch that was planned.
        agree: whether the losses of parts add up, or None if they were not compared.
        notes: where it is noted if they do not.
    """

    def __init__(
        self, loop: Loop, counts: Sequence[int], sample: Any, agree: bool | None, notes: list[str]
    ) -> None:
        self._loop, self._counts, self._notes = loop, tuple(counts), notes
        self._agree = agree if len(self._counts) > 1 else False
        self._sample = sample if self._agree is None else None

    def above(self, count: int) -> list[int]:
        """Returns the numbers of micro-batches above ``count``; none if the gradients of parts do
        not add up to that of the batch, or if there is no memory to compare them. The model stays
        as it is."""
        more = [number for number in self._counts if number > count]
        if more and self._agree is None:
            self._compare()
        return more if self._agree else []

    def _compare(self) -> None:
        # The levels that were chosen stay: they are what there is memory for.
        setting = self._loop.setting.but(batch=self._sample, has_levels=False)
        reason, rule = NO_RULE, None
        try:
            rule = rule_of(setting, rules_of(setting))
        except Exception as error:
            if is_out_of_memory(error):
                return  # no answer: there may be memory the next time
            reason = f"parts of a batch cannot be compared with it: {error}"
        self._agree, self._sample = rule is not None, None
        if rule is None:
            self._notes.append(f"leaner() makes no more micro-batches: {reason}".partition("\n")[0])
        else:
            self._loop.rule = rule
