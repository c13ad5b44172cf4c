"""The base of callbacks that fit a training into a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._core.sizes import parse_bytes
from ..fitting import Fitted
from ..fitting.choice import ALLOWABLE
from ..fitting.ranks import RankError
from ..step.errors import PlanError
from .first_steps import ToldSteps

__all__ = ["OPTIMIZER_STAYS", "FitsLoop", "kept_or_found", "optimizer_of_choice", "with_kept"]

# The values that fields of a choice may have where a schedule has been made of the optimizer.
OPTIMIZER_STAYS: Mapping[str, tuple[str, ...]] = {"optimizer": ("given",), "weights": ("given",)}


def optimizer_of_choice(kept: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the values that these fields may have in a run that resumes one with a choice, the
    state of whose optimizer has to fit."""
    return {name: (kept[name],) for name in OPTIMIZER_STAYS}


def with_kept(allow: Sequence[str], kept: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns what may change the mathematics: what is allowed, and what the run does that is
    resumed."""
    taken = set() if kept is None else {kept["optimizer"], kept["weights"]} & set(ALLOWABLE)
    return (*allow, *sorted(taken - set(allow)))


def kept_or_found(
    kept: Mapping[str, Any] | None, fitted: Callable[[Mapping[str, Any] | None], Fitted]
) -> Fitted:
    """Returns what is fitted with the choice of the run that is resumed, which takes no measuring;
    without it, if that is not possible any more. All ranks do the same, because a call of
    :func:`headroom.fit` that raises on one of them does on all.

    Args:
        kept: the choice, or None.
        fitted: fits with a choice, or searches for one.
    """
    reason = None
    if kept is not None:
        try:
            return fitted(kept)
        except (TypeError, ValueError, PlanError, RankError) as error:
            reason = str(error)
    found = fitted(None)
    if reason is not None:
        found.notes.append(f"the choice of the run that is resumed is not taken again: {reason}")
    return found


class FitsLoop:
    """Fits a training that another library's loop runs into a budget of memory, and measures its
    first steps.

    Args:
        budget: bytes, or text such as "6 GiB"; None: the memory of the device.
        allow: what may change the mathematics: "8bit", "bf16", "adafactor".
        sample_batch: a batch as the loader yields it, where the first one is not among the
            longest. None: the first one.
        tell: is called with the table of what was chosen, and after three steps with what was
            measured, on the first rank.

    Attributes:
        fitted: what :func:`headroom.fit` found, from the beginning of the training on.
        choice: its choice, as plain data, which checkpoints keep, with the budget. A run that is
            resumed with the same budget takes it again and measures nothing.
        measured: peak and time of the first steps.
        extra: bytes of the budget that the loop itself holds.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        allow: Sequence[str] = (),
        *,
        sample_batch: Any = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.budget = budget
        self.allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self.sample_batch, self._tell = sample_batch, tell
        self.fitted: Fitted | None = None
        self.measured: ToldSteps | None = None
        self.choice: dict[str, Any] | None = None
        self.extra = 0
        self._batches = 1.0  # of a step, for each that was planned
        self._says = False  # on the first rank

    def again(self, kept: Mapping[str, Any] | None, budget: Any) -> Mapping[str, Any] | None:
        """Returns the choice that a checkpoint has kept if it was made within the same budget, for
        which another search would find nothing better; else None."""
        return kept if _bytes(budget) == _bytes(self.budget) else None

    def tell(self, text: str) -> None:
        """Tells on the first rank."""
        if self._says:
            self._tell(text)

    def _measure(
        self, model: nn.Module, optimizer: Any, device: torch.device, *, records: bool = True
    ) -> None:
        """Makes what measures the first steps."""
        assert self.fitted is not None
        told = self.fitted, self.extra, self._batches, self.tell
        self.measured = ToldSteps(model, optimizer, device, *told, records=records)


def _bytes(budget: Any) -> int | None:
    return None if budget is None else parse_bytes(budget, "budget")
