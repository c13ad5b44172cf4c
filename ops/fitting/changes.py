"""What each technique of a choice is worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .choice import Choice
from .fitted import Change
from .preparing import peak_before
from .search import Found, Search

__all__ = ["report_of"]

SAME = 0.002  # of the bytes: plans and estimates differ by less

_NAMES = {"headroom": "Headroom's", "8bit": "8-bit moments", "adafactor": "Adafactor"}


def report_of(search: Search, found: Found) -> dict[str, Any]:
    """Returns what a :class:`headroom.fitting.Fitted` says of the way to a choice: what was before,
    what each technique changed, and what else could be chosen."""
    before = peak_before(search, found)
    changes, seconds = _changes(search, found, before)
    return {
        "before_peak": before,
        "before_seconds": seconds,
        "changes": changes,
        "frontier": search.frontier(),
        "reachable": search.frontier(found.choice),
    }


def _changes(search: Search, found: Found, before: int | None) -> tuple[list[Change], float]:
    """Returns what each technique changed, one after the other, and the seconds of a step of the
    model as it was given. The bytes add up to the difference of the two plans.

    Args:
        before: the planned peak of the model as it was given.
    """
    given = type(search.families.techniques.given).__name__
    rows: list[Change] = []
    choice, outer = None, None
    peak, seconds = before, 0.0
    start: float | None = None
    for name, was, now, choice in _steps(search, found.choice, given):
        outer = search.outer_of(choice)
        if outer is None:
            continue
        levels = choice.levels
        point = outer.at(levels)
        here, time = point.peak, point.seconds
        if start is None:
            start = seconds = time
        if peak is None:
            peak = here
        if not name:
            if search.families.swaps_layers:
                rows.append(Change("layers", here - peak, 0.0, "as given", "Headroom's"))
                peak = here
            elif here - peak > SAME * peak:  # the blocks of the model kept less before
                rows.append(Change("levels", here - peak, 0.0, "as given", _counted(levels)))
                peak = here
            continue
        if choice == found.choice:
            here = found.plan.total_bytes
        rows.append(Change(name, here - peak, time - seconds, was, now))
        peak, seconds = here, time
    return rows, found.seconds if start is None else start


def _steps(search: Search, end: Choice, given: str) -> Iterator[tuple[str, str, str, Choice]]:
    """Yields names, what was before and after, and choices, from the model as it was given to the
    one that was found, with one technique more each time.

    Args:
        given: the name of the optimizer that was given.
    """
    fused = search.families.techniques.fused_losses[0]
    parts = search.families.techniques.micro_batches[0]
    choice = Choice(search.keeping_all(), parts, fused_loss=fused)
    yield "", "", "", choice
    if end.fused_loss != fused:
        choice = choice.but(fused_loss=end.fused_loss)
        yield "fused loss", "logits", "no logits", choice
    if end.optimizer != choice.optimizer:
        choice = choice.but(optimizer=end.optimizer)
        yield "optimizer", given, _NAMES[end.optimizer], choice
    if end.weights != choice.weights:
        choice = choice.but(weights=end.weights)
        yield "weights", "float32", "bfloat16 + 16 bits", choice
    if end.release:
        choice = choice.but(release=True)
        yield "release", "gradients stay", "released", choice
    if end.micro_batches > parts:
        choice = choice.but(micro_batches=end.micro_batches)
        yield "micro-batches", str(parts), str(end.micro_batches), choice
    if end.levels != choice.levels:
        yield "levels", _counted(choice.levels), _counted(end.levels), end


def _counted(levels: tuple[str, ...]) -> str:
    """How many blocks are at each level: "2 L0, 4 L5"."""
    return ", ".join(f"{levels.count(name)} {name}" for name in sorted(set(levels)))
