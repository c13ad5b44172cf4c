"""A choice of everything but the levels, and what the levels then cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from .choice import Choice
from .knapsack import Point, choose
from .measure import Measured
from .rest import Outline

__all__ = ["Outer"]


class Outer:
    """A choice of everything but the levels.

    Attributes:
        choice: without levels.
        measured: what its blocks cost, in one micro-batch.
        outline: what the levels do not decide, planned or estimated.
        seconds: of a step, besides the blocks.
        factor: of the seconds of the blocks, which small parts of a batch take longer for.
        is_planned: whether the outline is of a plan of this very choice.
        is_timed: whether the seconds are those of a measurement of this size of parts.
    """

    def __init__(
        self,
        choice: Choice,
        measured: Measured,
        outline: Outline,
        seconds: float,
        factor: float,
        is_timed: bool,
    ) -> None:
        self.choice, self.measured, self.outline = choice, measured, outline
        self.seconds, self.factor, self.is_timed = seconds, factor, is_timed
        self.is_planned = False
        self._off = 0  # how far the planned peak is from what the outline says
        self._share = outline.plan.device_share.bytes

    def planned(self, outline: Outline, levels: Sequence[str]) -> None:
        """Replaces the outline by that of a plan of this very choice with these levels."""
        self.outline, self.is_planned = outline, True
        peak = outline.plan.peak_bytes
        said = outline.peak(self.measured, levels, gradients_stay=self._stay)
        self._off = 0 if peak <= outline.floor else peak - said
        self._share = outline.plan.device_share.bytes
        self.__dict__.pop("points", None)

    def take(self, other: Outer) -> None:
        """Takes what is known of another that is of the same choice: what a plan said of it, and
        its points where nothing has changed since."""
        if other.is_planned:
            self.is_planned = True
            self.outline, self._off, self._share = other.outline, other._off, other._share
        self.__dict__.pop("points", None)
        if "points" in vars(other) and self._numbers == other._numbers:
            self.points = other.points

    @property
    def _numbers(self) -> tuple[Any, ...]:
        """What the points follow from."""
        outline = self.outline
        return (
            id(self.measured.blocks), self.seconds, self.factor, self._off, self._share,
            outline.base, outline.after_forward, outline.after_backward, outline.gradients,
            outline.floor,
        )  # fmt: skip

    @property
    def _stay(self) -> bool:
        return not self.choice.release and self.choice.micro_batches == 1

    @cached_property
    def points(self) -> list[Point]:
        """The levels that no others beat, by ascending peaks of the whole step on its device."""
        found = self.outline.frontier(self.measured, gradients_stay=self._stay)
        return [Point(self._on_device(p.peak), self._whole(p.seconds), p.levels) for p in found]

    def _on_device(self, peak: int) -> int:
        return max(self.outline.floor, peak + self._off) + self._share

    def _whole(self, seconds: float) -> float:
        return self.seconds + self.choice.micro_batches * self.factor * seconds

    def within(self, budget: int) -> Point | None:
        """Returns the fastest levels within a budget, or None."""
        return choose(self.points, budget)

    def at(self, levels: Sequence[str]) -> Point:
        """Returns the bytes and seconds of a step whose blocks are at ``levels``."""
        peak = self.outline.peak(self.measured, levels, gradients_stay=self._stay)
        blocks = self.measured.blocks
        seconds = sum(block.levels[level].seconds for block, level in zip(blocks, levels))
        return Point(self._on_device(peak), self._whole(seconds), tuple(levels))

    def choice_of(self, point: Point) -> Choice:
        return self.choice.but(levels=point.levels)
