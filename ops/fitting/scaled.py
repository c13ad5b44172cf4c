"""What a part of a batch costs, from what all of it costs."""

from __future__ import annotations

from dataclasses import replace

from .measure import BlockCosts, LevelCost, Measured
from .rest import Outline

__all__ = ["outline_of_part", "part_of"]


def part_of(measured: Measured, count: int, factor: float = 1.0) -> Measured:
    """Returns what one of ``count`` micro-batches costs.

    Bytes are those of the batch divided by their number, but for gradients of parameters, whose
    size is the same. Seconds are divided too, times ``factor``: small parts use a device less well.
    """
    return Measured(
        [_block(block, count, factor) for block in measured.blocks],
        measured.seconds_of_rest / count * factor,
    )


def _block(block: BlockCosts, count: int, factor: float) -> BlockCosts:
    levels = {
        name: _level(cost, block.gradients, count, factor) for name, cost in block.levels.items()
    }
    return replace(block, levels=levels)


def _level(cost: LevelCost, gradients: int, count: int, factor: float) -> LevelCost:
    def part(size: int, whole: int = 0) -> int:
        return whole + -(-max(0, size - whole) // count)

    return LevelCost(
        part(cost.held),
        part(cost.backward, min(cost.backward, gradients)),
        part(cost.backward_released, min(cost.backward_released, gradients)),
        part(cost.forward),
        cost.kept,
        cost.forward_seconds / count * factor,
        cost.backward_seconds / count * factor,
    )


def outline_of_part(outline: Outline, count: int, gradients: int) -> Outline:
    """Returns the outline of micro-batches, before it is planned.

    Args:
        gradients: of all parameters, which are there from the second micro-batch on.
    """
    return replace(
        outline,
        base=outline.base + gradients,
        after_forward=-(-outline.after_forward // count),
        after_backward=-(-outline.after_backward // count),
        gradients=0,
    )
