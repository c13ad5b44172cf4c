"""The bytes of a choice by kind, from the one plan that serves for all levels of a kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..memory.events import Timeline
from .measure import Measured
from .outer import Outer
from .replacing import is_headroom, state_bytes

__all__ = ["peak_by_kind"]

STANDING = ("parameters", "master_weights", "buffers", "batch")


def peak_by_kind(outer: Outer, levels: Sequence[str], peak: int, optimizer: Any) -> dict[str, int]:
    """Returns the bytes of each kind at the peak of a step; they add up to ``peak``.

    What stands for the whole step is known exactly. What blocks keep is what was measured of them,
    and what is kept outside of blocks is what the plan has. The rest is temporaries.

    Args:
        outer: the choice without its levels.
        peak: its bytes on the device.
        optimizer: of the choice.
    """
    outline, measured = outer.outline, outer.measured
    timeline = outline.plan.timeline
    at = _when(timeline, "forward")
    found = {kind: at[kind] for kind in STANDING}
    found["optimizer_state"] = at["optimizer_state"]
    if is_headroom(optimizer):
        found["optimizer_state"] = state_bytes(optimizer)
    found["device"] = outline.plan.device_share.bytes
    left = max(0, peak - sum(found.values()))
    in_step = peak - found["device"] <= outline.floor  # of the optimizer, or around the blocks
    gradients = timeline.most_by_kind["gradients"]
    if outer.choice.release or not (in_step or outer.choice.micro_batches > 1):
        gradients = min(gradients, outline.gradients)
    found["gradients"] = min(left, gradients)
    left -= found["gradients"]
    outside = max(0, _when(timeline, "backward")["activations"] - _held_in_plan(outer))
    kept = 0 if in_step else outside + _held(measured, levels)
    found["activations"] = min(left, kept)
    found["temporaries"] = left - found["activations"]
    return {kind: size for kind, size in found.items() if size}


def _when(timeline: Timeline, phase: str) -> dict[str, int]:
    """The bytes of each kind when this phase begins for the last time."""
    return timeline.by_kind(max(span.start for span in timeline.spans if span.phase == phase))


def _held(measured: Measured, levels: Sequence[str]) -> int:
    """The bytes that all blocks keep, and that the last of them computes again meanwhile."""
    pairs = zip(measured.blocks, levels, strict=True)
    held = [block.levels[level].held for block, level in pairs]
    again = (
        cost.held - held[-1] for block in measured.blocks[-1:] for cost in block.levels.values()
    )
    return sum(held) + max(again, default=0)


def _held_in_plan(outer: Outer) -> int:
    """The bytes that blocks kept in the plan of the outline, where they were at their leanest."""
    return sum(list(block.levels.values())[-1].held for block in outer.measured.blocks)
