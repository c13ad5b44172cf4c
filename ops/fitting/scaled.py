"""What a part of a batch costs, from what all of it costs."""

from __future__ import annotations

from dataclasses import replace

from .measure import BlockCosts, LevelCost, Measured
from .rest import Outline

__all__ = ["outline_of_part", "part_of"]


def part_of(measured: Measured, count: int) -> Measured:
    """Returns what the blocks cost in one of ``count`` micro-batches.

    Bytes are those of the batch divided by their number, but for gradients of parameters, whose
    size is the same: all of them where they stay, or else one at a time. Seconds are divided too.
    """
    return Measured([_block(block, count) for block in measured.blocks])


def _block(block: BlockCosts, count: int) -> BlockCosts:
    levels = {name: _level(cost, block, count) for name, cost in block.levels.items()}
    return replace(block, levels=levels)


def _level(cost: LevelCost, block: BlockCosts, count: int) -> LevelCost:
    def part(size: int, whole: int = 0) -> int:
        return whole + -(-max(0, size - whole) // count)

    return LevelCost(
        part(cost.held),
        part(cost.backward, min(cost.backward, block.gradients)),
        part(cost.backward_released, min(cost.backward_released, block.largest)),
        part(cost.forward),
        cost.kept,
        cost.forward_seconds / count,
        cost.backward_seconds / count,
    )


def outline_of_part(outline: Outline, count: int, gradients: int) -> Outline:
    """Returns the outline of micro-batches, before it is planned.

    Args:
        gradients: of all parameters, which are there from the second micro-batch on.
    """
    standing = sum(outline.standing.values())
    before = max(0, outline.base - standing)  # the first block
    passing = max(0, outline.floor - standing - gradients)  # live around the blocks
    around = standing + gradients + -(-passing // count)
    return replace(
        outline,
        base=standing + -(-before // count) + gradients,
        after_forward=-(-outline.after_forward // count),
        after_backward=-(-outline.after_backward // count),
        gradients=0,
        floor=max(outline.plan.timeline.peaks_by_phase().get("optimizer", 0), around),
    )
