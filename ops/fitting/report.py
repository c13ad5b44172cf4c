"""Reports what was chosen, as text of at most 80 columns and for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._core.sizes import format_bytes
from .._core.text import shortened
from ..step.micro_batches import SAMPLES
from .choice import Choice, FrontierPoint

__all__ = ["Change", "Chosen", "described", "report"]

WIDTH = 80


@dataclass(frozen=True)
class Change:
    """The change that one technique makes.

    Attributes:
        technique: its name.
        bytes: how much more the peak is with it, by the estimates; mostly negative.
        seconds: how much more a step takes.
        before, after: in words.
    """

    technique: str
    bytes: int
    seconds: float
    before: str
    after: str


@dataclass
class Chosen:
    """Tells what was chosen, and what is known of it besides a plan.

    Attributes:
        choice: how the model is trained.
        agree: whether the losses of parts of a batch add up; None: not compared yet.
        rule: what the loss is a mean over; see :mod:`headroom.step.micro_batches`.
        notes: what could not be used, and why.
        predicted_seconds: of a step with the choice. There are none for a choice that was given.
        before_peak, before_seconds: predicted for the model as it was given.
        changes: what each technique changed, of the choice that :func:`headroom.fit` made.
        frontier: the choices that no other beats, by ascending peaks, as far as they were looked
            at; their bytes are estimates.
        reachable: like ``frontier``, but of the choices that :meth:`Fitted.set_levels` can reach.
    """

    choice: Choice
    agree: bool | None = None
    rule: str = SAMPLES
    notes: list[str] = field(default_factory=list)
    predicted_seconds: float | None = None
    before_peak: int | None = None
    before_seconds: float | None = None
    changes: Sequence[Change] = ()
    frontier: Sequence[FrontierPoint] = ()
    reachable: Sequence[FrontierPoint] = ()


def report(fitted: Any) -> str:
    """Returns the report."""
    name = shortened(type(fitted.model).__name__, 40)
    state = "" if fitted.is_applied else ", not applied"
    lines = [f"{name} in {format_bytes(fitted.budget)}{state}", ""]
    host = [None, fitted.predicted_host, fitted.measured_host]
    is_on_host = any(host)
    lines.append(f"{'':<16}{'peak':>12}{'a step':>12}{'on the host' * is_on_host:>14}")
    rows = [
        _row("as given", fitted.before_peak, fitted.before_seconds),
        _row("predicted", fitted.predicted_peak, fitted.predicted_seconds),
        _row("measured", fitted.measured_peak, fitted.measured_seconds),
    ]
    for row, size in zip(rows, host):
        shown = "-" if size is None else format_bytes(size)
        lines.append(f"{row}{shown:>14}" if is_on_host else row)
    if fitted.changes:
        lines += ["", f"{'technique':<16}{'bytes':>12}{'time':>12}  before -> after"]
    else:
        lines.append("")
    for change in fitted.changes:
        what = shortened(f"{change.before} -> {change.after}", WIDTH - 42, "beginning")
        size, time = format_bytes(change.bytes, "+"), _milliseconds(change.seconds, "+")
        lines.append(f"{change.technique:<16}{size:>12}{time:>12}  {what}")
    if not fitted.changes:
        given = f"as was chosen before: {fitted.first_choice}"
        lines.append(shortened(given, WIDTH) if fitted.is_given else "nothing had to be changed")
    if any(change.technique == "levels" for change in fitted.changes):
        lines.append("levels are what blocks keep for the backward pass: L0 the most, L5 the least")
    if fitted.choice != fitted.first_choice:
        lines.append(shortened(f"changed since then to: {fitted.choice}", WIDTH))
    neighbors = (("faster", fitted.next_up), ("leaner", fitted.next_down))
    if not fitted.is_given and fitted.predicted_peak is not None:
        lines += [""] + [_neighbor(fitted, name, point) for name, point in neighbors]
    for note in fitted.notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent="note: ", subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, peak: int | None, seconds: float | None) -> str:
    size = "-" if peak is None else format_bytes(peak)
    time = "-" if seconds is None else _milliseconds(seconds)
    return f"{name:<16}{size:>12}{time:>12}"


def _milliseconds(seconds: float, sign: str = "") -> str:
    digits = 0 if abs(seconds) >= 0.1 else 1
    return f"{1000 * seconds:{sign},.{digits}f} ms"


def _neighbor(fitted: Any, name: str, point: FrontierPoint | None) -> str:
    if point is None or fitted.predicted_peak is None:
        return f"next {name}: none was found"
    size = format_bytes(point.peak - fitted.predicted_peak, "+")
    time = _milliseconds(point.seconds - (fitted.predicted_seconds or 0.0), "+")
    return f"next {name}: {format_bytes(point.peak)} ({size}), {time} a step"


def described(fitted: Any) -> dict[str, Any]:
    """Returns the report in what :mod:`json` writes."""
    return {
        "format": "headroom.fitted/1",
        "model": type(fitted.model).__name__,
        "budget_bytes": fitted.budget,
        "choice": fitted.choice.to_json(),
        "blocks": fitted.blocks,
        "applied": fitted.is_applied,
        "before": {"peak_bytes": fitted.before_peak, "seconds": fitted.before_seconds},
        "host_budget_bytes": fitted.host_budget,
        "predicted": {
            "peak_bytes": fitted.predicted_peak,
            "seconds": fitted.predicted_seconds,
            "host_bytes": fitted.predicted_host,
        },
        "measured": {
            "peak_bytes": fitted.measured_peak,
            "seconds": fitted.measured_seconds,
            "host_bytes": fitted.measured_host,
        },
        "changes": [vars(change) for change in fitted.changes],
        "frontier": [
            {
                "peak_bytes": p.peak,
                "seconds": p.seconds,
                "host_bytes": p.host,
                "choice": p.choice.to_json(),
            }
            for p in fitted.frontier
        ],
        "notes": fitted.notes,
    }
