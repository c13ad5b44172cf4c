"""Chooses a save level for each block: all optimal trades of peak memory against time.

Blocks run forward from the first to the last, and backward from the last to the first. With block
i at level k, ``P_i`` is the most bytes that are live from the start of its forward pass to the end
of its backward pass, beyond those that were live before it::

    P_{L+1} = after
    P_i = max(forward_i(k), held_i(k) + max(backward_i(k) + G_i, P_{i+1}))
    G_i = the gradients of what runs after the last block, and of the blocks behind i

A smaller ``P_{i+1}`` never makes ``P_i`` larger, so of the choices for the blocks behind i only
those count that no other choice beats in both bytes and seconds. A dynamic program from the last
block to the first that keeps exactly those is therefore exact, for all budgets at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """The costs of a block at one level.

    Attributes:
        name: of the level, such as "L2".
        held: bytes from the forward to the backward pass, the result of the block included.
        backward: bytes that the backward pass takes besides, at its most; the gradients of the
            block's own parameters count as far as they are there at that moment.
        forward: bytes that the forward pass takes, at its most, its results included.
        seconds: of the forward and the backward pass.
    """

    name: str
    held: int
    backward: int
    forward: int
    seconds: float


@dataclass(frozen=True)
class BlockOptions:
    """The levels that a block can be at.

    Attributes:
        levels: one or more.
        gradients: bytes of gradients of its parameters that stay after its backward pass.
    """

    levels: tuple[Level, ...]
    gradients: int = 0


@dataclass(frozen=True)
class Point:
    """One choice of levels.

    Attributes:
        peak: the most bytes that are live at once, of what the levels decide.
        seconds: of all blocks.
        levels: the name of the level of each block, in forward order.
    """

    peak: int
    seconds: float
    levels: tuple[str, ...]


class _Stage(NamedTuple):
    """The choices for a block and those behind it, sorted by ascending peaks."""

    peaks: Tensor  # int64
    seconds: Tensor  # float64
    level: Tensor  # of this block, by its number
    following: Tensor  # the choice for the blocks behind, by its number in their stage


def frontier(
    blocks: Sequence[BlockOptions], after: int = 0, gradients: int = 0, *, states: int = 4096
) -> list[Point]:
    """Returns every choice of levels that no other beats, by ascending peaks and therefore strictly
    descending seconds.

    Args:
        blocks: in forward order.
        after: bytes that what runs between the forward and the backward pass of the last block
            takes at its most.
        gradients: bytes of gradients of parameters that stay from there.
        states: at most so many choices, 2 or more, are kept for the blocks behind each block. If
            there are more, those are left that are the fastest below peaks at equal distances.
            Every point is still a real choice with its true peak, but a better one may be missed.
    """
    stages: list[_Stage] = []
    peaks = torch.tensor([after], dtype=torch.int64)
    seconds = torch.zeros(1, dtype=torch.float64)
    for block in reversed(blocks):
        stage = _thinned(_best(block, gradients, peaks, seconds), states)
        stages.append(stage)
        peaks, seconds = stage.peaks, stage.seconds
        gradients += block.gradients
    stages.reverse()
    levels = _traced_back(blocks, stages, len(peaks))
    return [
        Point(peak, total, names)
        for peak, total, names in zip(peaks.tolist(), seconds.tolist(), zip(*levels))
    ] or [Point(after, 0.0, ())]


def choose(points: Sequence[Point], budget: int) -> Point | None:
    """Returns the fastest point of a frontier whose peak is at most ``budget``, or None."""
    found = bisect_right(points, budget, key=lambda point: point.peak)
    return points[found - 1] if found else None


def _best(block: BlockOptions, gradients: int, peaks: Tensor, seconds: Tensor) -> _Stage:
    """Combines each level of a block with each choice behind it, and keeps what nothing beats."""
    levels = block.levels
    held, least, forward = (
        torch.tensor(values, dtype=torch.int64)[:, None]
        for values in zip(
            *((level.held, level.backward + gradients, level.forward) for level in levels)
        )
    )
    own = torch.tensor([level.seconds for level in levels], dtype=torch.float64)[:, None]
    new_peaks = torch.maximum(forward, held + torch.maximum(least, peaks)).flatten()
    new_seconds = (own + seconds).flatten()
    # By peaks, and by seconds where those are equal; both sorts are stable, so that of equal
    # choices the one with the first level stays.
    order = new_seconds.argsort(stable=True)
    order = order[new_peaks[order].argsort(stable=True)]
    in_order = new_seconds[order]
    is_faster = torch.ones(len(order), dtype=torch.bool)
    is_faster[1:] = in_order[1:] < in_order.cummin(0).values[:-1]
    order = order[is_faster]
    return _Stage(new_peaks[order], new_seconds[order], order // len(peaks), order % len(peaks))


def _thinned(stage: _Stage, states: int) -> _Stage:
    if len(stage.peaks) <= states:
        return stage
    first, last = stage.peaks[0].item(), stage.peaks[-1].item()
    bounds = torch.linspace(first, last, states, dtype=torch.float64).floor().to(torch.int64)
    bounds[0], bounds[-1] = first, last  # to the byte, whatever linspace rounds
    kept = (torch.searchsorted(stage.peaks, bounds, right=True) - 1).unique()
    return _Stage(*(values[kept] for values in stage))


def _traced_back(
    blocks: Sequence[BlockOptions], stages: Sequence[_Stage], points: int
) -> list[list[str]]:
    """Returns for each block the names of its levels at all points."""
    at = torch.arange(points)
    found = []
    for block, stage in zip(blocks, stages):
        names = [level.name for level in block.levels]
        found.append([names[number] for number in stage.level[at].tolist()])
        at = stage.following[at]
    return found
