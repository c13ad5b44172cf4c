"""Says why memory ran out: what was asked for, what was live, and what to change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._core.lazy import advisers
from ..._core.sizes import format_bytes, parse_bytes
from ..._core.text import shortened
from ..cuda_trace import lines_of
from ..events import SMALLEST_BLOCK
from .loaded import Snapshot

__all__ = ["Called", "asked_bytes", "explain"]

_ROWS = 5
_LINES = 3  # of each stack
_ON_CPU = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes", re.DOTALL)
_ON_CUDA = re.compile(r"Tried to allocate ([\d.]+) (\w+)")


def asked_bytes(error: BaseException) -> int | None:
    """Returns how much was asked for when memory ran out; None for any other error, and 0 where the
    error does not say it."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if found := _ON_CPU.search(text):
        return int(found[1])
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    found = _ON_CUDA.search(text)
    return parse_bytes(f"{found[1]} {found[2]}") if found else 0


class Called(NamedTuple):
    """The parts of a step: ``batch`` is that of the arguments and named arguments that the
    model was called with last, on the meta device."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Any


def explain(
    snapshot: Snapshot, error: BaseException, asked: int, called: Called | None = None
) -> str:
    """Returns why memory ran out, as text of some 40 lines.

    Args:
        asked: the bytes of the request that failed, if the snapshot does not say it.
        called: what advice is given for, or None for no advice.
    """
    timeline = snapshot.timeline
    failure = snapshot.out_of_memory[-1] if snapshot.out_of_memory else None
    asked = failure.bytes if failure is not None and failure.bytes else asked
    index = timeline.events - 1 if failure is None else min(failure.event, timeline.events - 1)
    kinds = timeline.by_kind(index)
    live, span = sum(kinds.values()), timeline.span(index)
    callers = enumerate(_lines_of_error(error)[:_LINES])
    lines = [
        "",
        f"Memory ran out on {snapshot.device}: {format_bytes(asked)} were asked for, and "
        f"{format_bytes(live)} were live, in step {span.step}, {span.phase}.",
        *(f"{'  asked for' if n == 0 else '     called'} at {line}" for n, line in callers),
        "",
        f"{'live by kind':<22}{'bytes':>12}{'share':>9}",
    ]
    ordered = sorted(((size, kind) for kind, size in kinds.items() if size), reverse=True)
    lines += [_row(kind, size, live) for size, kind in ordered]
    lines += ["", "live by module"]
    modules = timeline.by_module(index)
    for name, sizes in list(modules.items())[:_ROWS]:
        shown = {"": "(model)", "-": "of no module"}.get(name, name)
        lines.append(_row(shown, sum(sizes.values()), live))
    lines += ["", "largest owners"]
    for owner in timeline.owners(index, _ROWS):
        count = "" if owner.count == 1 else f" in {owner.count} pieces"
        name = owner._replace(stack=()).name
        lines.append(f"  {format_bytes(owner.bytes)}{count}, {owner.kind}: {name}")
        lines += [f"      {line}" for line in dict.fromkeys(owner.stack[: 2 * _LINES])][:_LINES]
    lines += ["", *_fragmentation(snapshot, asked), "", *_advice(called, asked)]
    return "\n".join(lines)


def _advice(called: Called | None, asked: int) -> list[str]:
    """Returns lines that say what would have made the step smaller."""
    why = "advice was turned off, or the model was called with more than tensors, or never"
    if called is not None:
        try:
            return [line for advise in advisers for line in advise(*called, asked)]
        except Exception as error:  # the error that is being explained matters more
            why = f"{error or type(error).__name__}".splitlines()[0]
    return [
        f"No changes could be planned: {why}.",
        "headroom.fit(model, batch, budget=...) chooses what to keep, by steps that it measures.",
    ]


def _row(name: str, size: int, live: int) -> str:
    return f"{shortened(name, 21):<22}{format_bytes(size):>12}{100 * size / max(1, live):>7.1f} %"


def _lines_of_error(error: BaseException) -> tuple[str, ...]:
    """Returns the user's lines that the error came through, innermost first."""
    frames: list[Mapping[str, object]] = [
        {"name": frame.name, "filename": frame.filename, "line": frame.lineno}
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    return lines_of(frames)[0]


def _fragmentation(snapshot: Snapshot, asked: int) -> list[str]:
    """Says what the allocator held and nobody used."""
    failure = snapshot.out_of_memory[-1] if snapshot.out_of_memory else None
    whose = "system" if snapshot.device == "cpu" else "device"
    free = "" if failure is None else f"; the {whose} had {format_bytes(failure.device_free)} free"
    if snapshot.device == "cpu":
        return [f"The CPU's allocator keeps nothing back{free}."]
    timeline = snapshot.timeline
    index = timeline.events - 1 if failure is None else min(failure.event, timeline.events - 1)
    live = timeline.live(index)
    if live == snapshot.at_end():
        held = sum(segment.size for segment in snapshot.segments)
        gaps = [b.size for s in snapshot.segments for b in s.blocks if b.allocation is None]
        unused, largest = sum(gaps), max(gaps, default=0)
        where = f" in {len(gaps)} gaps, the largest of {format_bytes(largest)}"
    else:  # segments are those of the end: something has been freed since, and maybe given back
        held = snapshot.reserved_over_events()[index]
        unused = held - sum(-(-a.bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK for a in live)
        largest, where = 0, ""  # no gap was large enough
    lines = [
        f"The allocator held {format_bytes(held)}, of which {format_bytes(unused)} were free"
        f"{where}{free}."
    ]
    grows = any(segment.is_expandable for segment in snapshot.segments)
    if largest < asked <= unused and not grows:
        lines += [
            "The gaps together would have been enough: let segments grow, with",
            '       os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
        ]
    return lines
