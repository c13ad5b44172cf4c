"""What a way of saving memory says of itself: the protocol, and the list of all that are known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..step.description import Step

Change = tuple[str, Step, str, str, str]
"""The name of a change, the step with it, and ``time``, ``source`` and ``code`` of its advice."""


class Option(NamedTuple):
    """An argument of :func:`headroom.plan` by which a user sets a technique: its default, the least
    of its numbers or its choices, and what the command line says of it. A flag is False by default.
    """

    default: Any = None
    least: int | None = None
    choices: Sequence[str] | None = None
    help: str | None = None


TECHNIQUES: list[Technique] = []
"""All techniques, in the order in which they are asked and applied."""


@dataclass(frozen=True)
class Request:
    """Describes what is to be trained, for techniques to say what can be chosen.

    Attributes:
        step: that is made, with the optimizer of the loop, which may be none of those that can be
            chosen.
        allowed: what changes the mathematics, and may.
        only: the values that fields of a choice may have in the loop that trains; a field that is
            not there may have any.
        parts_add_up: whether the loop itself sees to it that the losses of parts of a batch add up,
            so that they are not compared with the loss of the batch.
        on_host: whether the host may hold what the device has no room for.
        given: a choice that was made before, whose state on the host can be chosen again.
        optimizers: that can be chosen, by the fields ``optimizer`` and ``weights`` of a choice.
        layers: the names of those whose frozen weights can be quantized.
        notes: why something cannot be chosen.
    """

    step: Step
    allowed: tuple[str, ...] = ()
    only: Mapping[str, Collection[Any]] = field(default_factory=dict)
    parts_add_up: bool = False
    on_host: bool = False
    given: Any = None
    optimizers: dict[tuple[str, str], torch.optim.Optimizer] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _found: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """Returns the device of the step."""
        assert self.step.device is not None
        return self.step.device

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        """Returns what ``find()`` has returned the first time for this key."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


@dataclass
class Target:
    """A model that techniques change, or a copy of it.

    Attributes:
        model, optimizer: that are trained.
        blocks: the names of the blocks that ``choice.levels`` are for.
        layers: the names of those whose frozen weights are quantized, if the choice says so.
    """

    model: nn.Module
    optimizer: Any
    blocks: Sequence[str] = ()
    layers: Sequence[str] = ()


@dataclass
class Running:
    """A training that runs, and can be made to take less memory.

    Attributes:
        optimizers: of the training.
        raised: the :class:`headroom.techniques.levels.RaisedLevels` of its model.
        parts, most_parts: micro-batches, now and at the most.
    """

    optimizers: Sequence[Any]
    raised: Any
    parts: int = 1
    most_parts: int = 1


class Technique:
    """A way of saving memory. A subclass says ``field`` and ``default``, and overrides what differs
    from a technique that is never chosen. One that is appended to ``TECHNIQUES`` is planned,
    chosen, refused, applied, undone, advised and offered by the command line.

    In all methods ``choice`` is a :class:`headroom.fitting.Choice`. Those that change a model are
    called for choices that use the technique.

    Attributes:
        field: the name of its field of a choice.
        default: the value of the field where the technique is not used.
        told: its place in a choice in words.
        row: its place in a report.
        allowed: what changes the mathematics and must be allowed, with the order in which that is
            tried: values of the field if these are names, else the field.
        changes: of each of ``allowed`` what it changes, in a few words.
        is_searched: whether its values are enumerated. Those of levels are found by a knapsack.
        counts: whether it counts as a technique of its own.
        least: the least of its values, if these are whole numbers.
    """

    field: str
    default: Any
    told = 50
    row = 6
    allowed: Mapping[str, int] = {}
    changes: Mapping[str, str] = {}
    is_searched = True
    counts = True
    least = 1

    def value(self, choice: Any) -> Any:
        """Returns the value of its field."""
        return getattr(choice, self.field)

    def is_used(self, choice: Any) -> bool:
        """Returns whether a choice uses it."""
        return self.value(choice) != self.default

    def needs(self, choice: Any) -> str:
        """Returns what must be allowed for a choice, if it is one of ``allowed``."""
        value = self.value(choice) if self.is_used(choice) else ""
        return value if isinstance(value, str) else self.field

    # ---- what can be chosen ---------------------------------------------------------------------

    def refusal_of_type(self, value: Any) -> str | None:
        """Returns what was wanted in the place of a value that the field cannot have, or None."""
        kind = type(self.default)
        return None if type(value) is kind else f"one of type {kind.__name__}"

    def values(self, request: Request, choice: Any) -> Sequence[Any]:
        """Returns the values that can be chosen beside those of the techniques before it, which
        ``choice`` has; none where nothing is possible beside these. Notes why others cannot be."""
        return (self.default,)

    def rank(self, value: Any) -> int:
        """Returns a number by which choices are sorted that are as fast: lower ones come first."""
        return 0

    hint = ""
    """What is said besides if the values that a loop takes cannot be."""

    # ---- what a choice does ---------------------------------------------------------------------

    def on_step(self, step: Step, choice: Any, blocks: Sequence[str]) -> Step:
        """Returns the step to be planned with a choice. Its model stays as it is: see
        :meth:`on_copy`.

        Args:
            blocks: the names of the blocks that ``choice.levels`` are for.
        """
        return step

    def on_copy(self, target: Target, choice: Any) -> None:
        """Changes a copy of the model that is planned, whose tensors are those of the model."""

    def on_measured_copy(self, target: Target, choice: Any) -> None:
        """Changes a copy of the model that is run, whose tensors are its own."""
        self.on_copy(target, choice)

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        """Changes the model and its optimizer, and returns what takes that back, or None where
        removing what :func:`headroom.patch` has set does."""
        return None

    def reduce_memory(self, running: Running) -> str | None:
        """Takes the next value that needs less, with the same results. Returns what was changed, or
        None if there is none."""
        return None

    # ---- words ----------------------------------------------------------------------------------

    in_words = ""
    """What a choice does that uses it, in a few words, with {} for the value."""

    in_row = "", "{}", "{}"
    """The name of a row of a report, and what was before and after, with {} for the values."""

    def words(self, choice: Any) -> list[str]:
        """Returns what a choice does that uses the technique, in a few words."""
        return [self.in_words.format(self.value(choice)) or self.field]

    def change(self, before: Any, after: Any, step: Step) -> tuple[str, str, str]:
        """Returns the name of a row of a report, and what was before and after."""
        was, now = self.value(before), self.value(after)
        name, first, last = self.in_row
        return name.format(now) or self.field, first.format(was), last.format(now)

    def advice(self, step: Step) -> Iterator[Change]:
        """Yields changes that might make a step smaller, with code for the reader."""
        yield from ()

    options: Mapping[str, Option] = {}
    """The arguments of :func:`headroom.plan` by which a user sets it, which the command line has
    too. A search decides them by itself."""


def searched() -> list[Technique]:
    """Returns the techniques whose values are enumerated, in the order in which they are asked."""
    return [technique for technique in TECHNIQUES if technique.is_searched]


def in_rows() -> list[Technique]:
    """Returns the techniques in the order in which reports show them."""
    return sorted(TECHNIQUES, key=lambda technique: technique.row)


def allowable() -> tuple[str, ...]:
    """Returns what changes the mathematics, and is used only if it is allowed."""
    found = [(n, name) for technique in TECHNIQUES for name, n in technique.allowed.items()]
    return tuple(name for _, name in sorted(found))


def change_of(name: str) -> str:
    """Returns what one of :func:`allowable` changes, in a few words."""
    return next((t.changes[name] for t in TECHNIQUES if name in t.changes), name)
