"""A choice of everything but the levels, and what the levels then cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...nn.steps import save_level
from ...planning.result import Plan
from ..choice import Choice, FrontierPoint
from ..costs.block_costs import Measured, is_on_host
from ..costs.outline import Outline
from .knapsack import BlockOptions, Level, Point, choose, frontier


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


class OnHost(NamedTuple):
    """The first blocks, which may be on the host at this level, and at those that keep less."""

    blocks: int
    most: str

    def has(self, block: int, level: str) -> bool:
        """Returns whether a block, by its number, may be at a level."""
        if not is_on_host(level):
            return True
        return block < self.blocks and save_level(level) >= save_level(self.most)


NOT_ON_HOST = OnHost(0, "")


class Frontiers:
    """Finds all levels of blocks that no others beat, and keeps them: choices that differ in the
    optimizer ask for the same ones."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Measured, list[Point]]] = {}

    def of(
        self, measured: Measured, outline: Outline, *, gradients_stay: bool = True, on_host: int = 0
    ) -> list[Point]:
        """Returns the points of :func:`headroom.fitting.search.knapsack.frontier` with the peaks of
        the whole step and the seconds of the blocks.

        What is kept until the forward pass has ended differs from level to level. The knapsack
        takes the most of it, and the points then have their own peaks.

        Args:
            on_host: bytes that blocks may hold there.
        """
        kept = sum(block.kept for block in measured.blocks)
        after = max(outline.after_backward, outline.after_forward + kept)
        points: list[Point] = []
        for first in _on_host(measured, on_host):
            key = id(measured), after, outline.gradients, gradients_stay, first
            if key not in self._found:
                options = levels_of(measured, gradients_stay=gradients_stay, on_host=first)
                self._found[key] = measured, frontier(options, after, outline.gradients)
            points += self._found[key][1]
        found: list[Point] = []
        for point in sorted(points, key=lambda point: (point.seconds, point.peak)):
            peak = max(outline.least, outline.base + point.peak)
            if kept:
                peak = outline.peak(measured, point.levels, gradients_stay=gradients_stay)
            if not found or peak < found[-1].peak:
                found.append(Point(peak, point.seconds, point.levels))
        return found[::-1]


def _on_host(measured: Measured, room: int) -> list[OnHost]:
    """Returns which blocks may hold on the host what they keep. For each level that is the most
    that they keep there, these are as many of the first blocks as there is room for, so that the
    search finds few blocks that keep much there, and many that keep little. The last block wants
    its tensors back at once, and has them stay."""
    blocks = measured.blocks[:-1]
    found = [NOT_ON_HOST]
    on_host = {level for block in blocks for level in block.levels if is_on_host(level)}
    for most in sorted(on_host, key=save_level):
        count = taken = 0
        for block in blocks:
            levels = block.levels.items()
            taken += max(cost.moved for name, cost in levels if OnHost(1, most).has(0, name))
            if taken > room:
                break
            count += 1
        if count > found[-1].blocks:
            found.append(OnHost(count, most))
    return found[1:] or found


def levels_of(
    measured: Measured, *, gradients_stay: bool = True, on_host: OnHost = NOT_ON_HOST
) -> list[BlockOptions]:
    """Returns what blocks can be set to, for :func:`headroom.fitting.search.knapsack.frontier`.

    Args:
        gradients_stay: whether gradients of parameters stay until the end of the backward pass.
            They do not if they are released, and in all micro-batches but the first they were
            there before.
        on_host: which blocks may hold on the host what they keep.
    """
    found, kept = [], 0
    for number, block in enumerate(measured.blocks):
        levels = tuple(
            Level(
                name,
                cost.held,
                cost.backward if gradients_stay else cost.backward_released,
                cost.forward + kept,
                cost.seconds,
            )
            for name, cost in block.levels.items()
            if on_host.has(number, name)
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
        on_host: bytes of the optimizer's state there.
        host_room: bytes that may be there in all.
    """

    choice: Choice
    measured: Measured
    outline: Outline
    seconds: float
    factor: float
    is_timed: bool
    planned: tuple[str, ...] | None
    frontiers: Frontiers
    on_host: int = 0
    host_room: int | None = None

    @cached_property
    def points(self) -> list[Point]:
        """Returns the levels that no others beat, by ascending peaks of the whole step on its
        device; none if the host has no room for the optimizer's state."""
        left = 0
        if self.host_room is not None:
            left = self.host_room - self.on_host - self._off_on_host
            if left < 0:
                return []
        stay = self._gradients_stay
        found = self.frontiers.of(self.measured, self.outline, gradients_stay=stay, on_host=left)
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

    def host_at(self, levels: Sequence[str]) -> int:
        """Returns the bytes on the host of a step whose blocks are at ``levels``."""
        return self._outlined_on_host(levels) + self._off_on_host

    def estimate(self, levels: Sequence[str]) -> FrontierPoint:
        """Returns what a step takes whose blocks are at ``levels``."""
        point, host = self.at(levels), self.host_at(levels)
        return FrontierPoint(point.peak, point.seconds, self.choice_of(point), host)

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
        if self.planned is None or peak <= self.outline.least:
            return 0
        return peak - self._outlined(self.planned)

    @cached_property
    def _off_on_host(self) -> int:
        """Returns by how much the plan holds more on the host than is said of those levels."""
        if self.planned is None:
            return 0
        return self.outline.plan.host_peak_bytes - self._outlined_on_host(self.planned)

    def _outlined_on_host(self, levels: Sequence[str]) -> int:
        blocks = zip(self.measured.blocks, levels, strict=True)
        return self.on_host + sum(block.levels[level].moved for block, level in blocks)

    def _outlined(self, levels: Sequence[str]) -> int:
        return self.outline.peak(self.measured, levels, gradients_stay=self._gradients_stay)

    def _on_device(self, peak: int) -> int:
        return max(self.outline.least, peak + self._off) + self.outline.plan.device_share.bytes

    def _whole(self, seconds: float) -> float:
        return self.seconds + self.choice.micro_batches * self.factor * seconds
