"""Finds what can be chosen for a model: the values of all techniques together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...step.description import Step
from ...techniques.frozen import Frozen
from ...techniques.levels import IN_8_BITS
from ...techniques.technique import Request, allowable, searched
from ..choice import Choice


@dataclass(frozen=True)
class Techniques(Request):
    """Holds the choices that are possible for a model, besides levels.

    Attributes:
        choices: all that are possible, without levels, those with the fewest micro-batches first.
    """

    choices: tuple[Choice, ...] = ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Returns the numbers of micro-batches that can be chosen, the fewest first."""
        return tuple(dict.fromkeys(choice.micro_batches for choice in self.choices))

    @property
    def fused_losses(self) -> tuple[bool, ...]:
        """Returns the values that ``fused_loss`` can have, that of the model as it is first."""
        return tuple(dict.fromkeys(choice.fused_loss for choice in self.choices))

    @property
    def formats(self) -> tuple[str, ...]:
        """Returns the values that ``frozen`` can have, in the order in which they are looked at:
        that which changes the weights the least first."""
        found = {choice.frozen for choice in self.choices}
        return tuple(each for each in ("given", *Frozen.allowed) if each in found)

    @property
    def in_8_bits(self) -> bool:
        """Returns whether blocks may keep their inputs in 8 bits."""
        return IN_8_BITS in self.allowed

    def optimizer_of(self, choice: Choice) -> torch.optim.Optimizer:
        """Returns the optimizer of a choice."""
        return self.optimizers[choice.optimizer, choice.weights]

    def whole_batches(self, reason: str) -> Techniques:
        """Returns the techniques without micro-batches, and with the reason as a note.

        Raises:
            ValueError: ``only`` wants no whole batches.
        """
        found = replace(self, notes=[*self.notes, f"micro-batches: {reason}"])
        whole = tuple(choice for choice in self.choices if choice.micro_batches == 1)
        if not whole:
            raise found.refusal("micro_batches", (1,))
        return replace(found, choices=whole)

    def obstacle(self, choice: Choice) -> str | None:
        """Returns why a choice, whatever its levels, cannot be for this model, or None."""
        left: Sequence[Choice] = self.choices
        for name in (technique.field for technique in searched()):
            got, possible = getattr(choice, name), _values(left, name)
            if got not in possible:
                return f"has {name}={got!r}, wanted {_one_of(possible)}{self._reasons()}"
            left = [each for each in left if getattr(each, name) == got]
        return None

    def refusal(self, name: str, possible: Collection[Any]) -> ValueError:
        """Returns the error that says that ``only`` leaves no value of a field."""
        given = ", ".join(f"{key}={tuple(values)!r}" for key, values in self.only.items())
        technique = next(technique for technique in searched() if technique.field == name)
        asked = {technique.needs(Choice().but(**{name: value})) for value in self.only[name]}
        missing = asked & {*allowable()} - {*self.allowed}
        hint = technique.hint or "".join(f'; "{one}" is not in allow' for one in sorted(missing))
        wanted = f"{_one_of(possible)} for {name}{hint}"
        return ValueError(f"only has {given}, wanted {wanted}{self._reasons()}")

    def _reasons(self) -> str:
        return "".join(f"; {note}" for note in self.notes)


def _values(choices: Sequence[Choice], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(choice, name) for choice in choices))


def _one_of(values: Collection[Any]) -> str:
    return f"one of {', '.join(str(value) or repr(value) for value in values)}"


def techniques_of(
    step: Step,
    allow: Collection[str] = (),
    only: Mapping[str, Collection[Any]] | None = None,
    parts_add_up: bool = False,
    on_host: bool = False,
    given: Choice | None = None,
) -> Techniques:
    """Returns the techniques for a step, whose optimizer is made.

    Args:
        given: a choice, whose state on the host is one of the techniques.

    Raises:
        ValueError: ``only`` leaves no value of a field.
    """
    only = only or {}
    request = Request(step, tuple(allow), only, parts_add_up, on_host, given)
    choices = [Choice()]
    for technique in searched():
        choices = [
            choice.but(**{technique.field: value})
            for choice in choices
            for value in technique.values(request, choice)
        ]
    choices.sort(key=_rank)
    every = Techniques(**vars(request), choices=tuple(choices))
    left = choices
    for name in (technique.field for technique in searched()):
        if name in only:
            possible = _values(left, name)
            left = [choice for choice in left if getattr(choice, name) in only[name]]
            if not left:
                raise every.refusal(name, possible)
    keys = {(choice.optimizer, choice.weights) for choice in left}
    optimizers = {key: one for key, one in request.optimizers.items() if key in keys}
    return replace(every, optimizers=optimizers, choices=tuple(left))


def _rank(choice: Choice) -> tuple[int, ...]:
    """Returns by what choices are sorted: whole batches come first, and then what the device holds
    and what is not quantized."""
    ranks = [technique.rank(technique.value(choice)) for technique in searched()]
    return choice.micro_batches, *reversed(ranks)
