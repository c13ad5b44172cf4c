"""Divides the time of a step into phases that add up to it.

Marks are: a forward pass of the model, from its first module to its last; nodes of autograd that
run, on any thread; calls of ``step`` and ``zero_grad`` of optimizers; batches that torch's
DataLoader makes. What is between marks belongs to

=========================================  ====================================================
in front of a forward pass                 data: from the end of the step to the next batch's use
between a forward and a backward pass      forward: the loss
between two nodes of one backward pass     backward
in front of a batch of a DataLoader        data, at the begin of a step; else other
anything else                              other: clipping, logging, evaluation
=========================================  ====================================================

Without a range of the model, as when only a part of it is compiled and none of it seen, what is in
front of the backward pass and is not a DataLoader's counts as forward.
"""

from __future__ import annotations

from .events import Call, Recording

__all__ = ["PHASES", "Interval", "intervals"]

PHASES: tuple[str, ...] = ("data", "forward", "backward", "optimizer", "other")
Interval = tuple[int, int, str]  # nanoseconds and a phase


def intervals(recording: Recording, step: Call) -> list[Interval]:
    """Returns the phases of a step in order, without gaps."""
    found: list[Interval] = []
    now, last = step.start, ""  # the phase of the mark before
    for start, end, phase in _marks(recording, step):
        start, end = max(start, now), min(end, step.end)
        if start > now:
            found.append((now, start, _between(last, phase)))
        if end > start:
            found.append((start, end, phase))
        now, last = max(now, end), phase
    if step.end > now:
        found.append((now, step.end, "other"))
    return _joined(found)


def _between(last: str, phase: str) -> str:
    if phase == "forward":
        return "forward" if last == "forward" else "data"
    if phase == "backward":
        return "backward" if last == "backward" else "forward"
    if phase == "data" and last in ("", "data"):
        return "data"
    if phase == "optimizer" and last == "optimizer":
        return "optimizer"
    return "other"


def _marks(recording: Recording, step: Call) -> list[Interval]:
    marks: list[Interval] = []
    for call in recording.calls:
        if call.start < step.start or call.start >= step.end:
            continue
        outer = call.parent
        here = call.thread == step.thread
        if call.is_node:
            if outer is None or outer.phase != "backward":
                marks.append((call.start, call.end, "backward"))
        elif here and call.is_optimizer:
            marks.append((call.start, call.end, "optimizer"))
        elif here and call.is_loader:
            marks.append((call.start, call.end, "data"))
        elif here and call.label is not None and call.phase == "forward":
            if outer is None or outer.module is None:
                marks.append((call.start, call.end, "forward"))
    return sorted(marks)


def _joined(found: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end, phase in found:
        if joined and joined[-1][2] == phase:
            start = joined.pop()[0]
        joined.append((start, end, phase))
    return joined
