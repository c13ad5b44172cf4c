"""A choice of everything but the levels, and what the levels then cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...planning.result import Plan
from ..choice import Choice
from ..costs.block_costs import Measured
from ..costs.outline import Outline
from .knapsack import BlockOptions, Level, Point, choose, frontier

__all__ = ["Candidate", "Found", "Frontiers", "levels_of"]


@dataclass(frozen=True)
class Found:
    """A choice with the plan that says that it fits.

    Attributes:
        seconds: of a step, estimated; None where nothing was measured.
        blocks: the names of the blocks that ``choice.levels`` is of.
    """

    choice: Choice
    plan: Plan
    seconds: float | None
    blocks: tuple[str, ...]


class Frontiers:
    """Finds all levels of blocks that no others beat, and keeps them: choices that differ in the
    optimizer ask for the same ones."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int, bool], tuple[Measured, list[Point]]] = {}

    def of(
        self, measured: Measured, outline: Outline, *, gradients_stay: bool = True
    ) -> list[Point]:
        """Returns the points of :func:`headroom.fitting.search.knapsack.frontier` with the peaks of
        the whole step and the seconds of the blocks.

        What is kept until the forward pass has ended differs from level to level. The knapsack
        takes the most of it, and the points then have their own peaks.
        """
        kept = sum(block.kept for block in measured.blocks)
        after = max(outline.after_backward, outline.after_forward + kept)
        key = id(measured), after, outline.gradients, gradients_stay
        if key not in self._found:
            options = levels_of(measured, gradients_stay=gradients_stay)
            self._found[key] = measured, frontier(options, after, outline.gradients)
        found: list[Point] = []
        for point in reversed(self._found[key][1]):  # the fastest first
            peak = max(outline.floor, outline.base + point.peak)
            if kept:
                peak = outline.peak(measured, point.levels, gradients_stay=gradients_stay)
            if not found or peak < found[-1].peak:
                found.append(Point(peak, point.seconds, point.levels))
        return found[::-1]


def levels_of(measured: Measured, *, gradients_stay: bool = True) -> list[BlockOptions]:
    """Returns what blocks can be set to, for :func:`headroom.fitting.search.knapsack.frontier`.

    Args:
        gradients_stay: whether gradients of parameters stay until the end of the backward pass.
            They do not if they are released, and in all micro-batches but the first they were
            there before.
    """
    found, kept = [], 0
    for block in measured.blocks:
        levels = tuple(
            Level(
                name,
                cost.held,
                cost.backward if gradients_stay else cost.backward_released,
                cost.forward + kept,
                cost.seconds,
            )
            for name, cost in block.levels.items()
        )
        found.append(BlockOptions(levels, block.gradients if gradients_stay else 0))
        kept += block.kept  # at most, while the blocks behind run forward
    return found


@dataclass(frozen=True)
class Candidate:
    """A choice of everything but the levels.

    Attributes:
        choice: without levels.
        measured: what its blocks cost, in one micro-batch.
        outline: what the levels do not decide, planned or estimated.
        seconds: of a step, besides the blocks.
        factor: of the seconds of the blocks, which small parts of a batch take longer for.
        is_timed: whether the seconds are those of a measurement of this size of parts.
        planned: the levels with which this very choice was planned; None where the outline is an
            estimate.
        frontiers: that are known already.
    """

    choice: Choice
    measured: Measured
    outline: Outline
    seconds: float
    factor: float
    is_timed: bool
    planned: tuple[str, ...] | None
    frontiers: Frontiers

    @cached_property
    def points(self) -> list[Point]:
        """Returns the levels that no others beat, by ascending peaks of the whole step on its
        device."""
        stay = self._gradients_stay
        found = self.frontiers.of(self.measured, self.outline, gradients_stay=stay)
        return [Point(self._on_device(p.peak), self._whole(p.seconds), p.levels) for p in found]

    def within(self, budget: int) -> Point | None:
        """Returns the fastest levels within a budget, or None."""
        return choose(self.points, budget)

    def at(self, levels: Sequence[str]) -> Point:
        """Returns the bytes and seconds of a step whose blocks are at ``levels``."""
        blocks = self.measured.blocks
        seconds = sum(block.levels[level].seconds for block, level in zip(blocks, levels))
        peak = self._on_device(self._outlined(levels))
        return Point(peak, self._whole(seconds), tuple(levels))

    def choice_of(self, point: Point) -> Choice:
        """Returns the choice with the levels of a point."""
        return self.choice.but(levels=point.levels)

    @property
    def keeping_all(self) -> tuple[str, ...]:
        """Returns the levels at which all blocks keep the most."""
        return tuple(next(iter(block.levels)) for block in self.measured.blocks)

    @property
    def _gradients_stay(self) -> bool:
        return not self.choice.release and self.choice.micro_batches == 1

    @cached_property
    def _off(self) -> int:
        """Returns by how much the plan's peak is above what its outline says of those levels."""
        peak = self.outline.plan.peak_bytes
        if self.planned is None or peak <= self.outline.floor:
            return 0
        return peak - self._outlined(self.planned)

    def _outlined(self, levels: Sequence[str]) -> int:
        return self.outline.peak(self.measured, levels, gradients_stay=self._gradients_stay)

    def _on_device(self, peak: int) -> int:
        return max(self.outline.floor, peak + self._off) + self.outline.plan.device_share.bytes

    def _whole(self, seconds: float) -> float:
        return self.seconds + self.choice.micro_batches * self.factor * seconds
