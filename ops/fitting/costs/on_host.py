"""Says what it costs that the host steps, or holds the weights of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...host.schedule import hosted_step, streamed_step
from ...host.simulation import Link
from .block_costs import BlockCosts, Measured

PIECE = 16 << 20  # bytes of gradients that leave together
PREFETCH = 1  # blocks, whose weights are fetched before they are asked for


def hosted_seconds(
    blocks: Sequence[BlockCosts],
    gradients: int,
    step_seconds: float,
    link: Link,
    within_backward: bool,
) -> float:
    """Returns the seconds that a step on the host adds to the passes.

    Args:
        blocks: in the order of the forward pass.
        gradients: bytes of all of them, which those of the weights are taken to be, too.
        step_seconds: of the host, for all of them.
        within_backward: whether gradients are released as soon as they are there.
    """
    sizes = [block.gradients for block in reversed(blocks)]
    sizes.append(max(0, gradients - sum(sizes)))  # the embedding, whose gradient comes last
    seconds = [block.levels[block.leanest].backward_seconds for block in reversed(blocks)]
    now, pieces, ready = 0.0, list[int](), list[float]()
    for size, taken in zip(sizes, [*seconds, 0.0]):
        now += taken
        cut = [min(PIECE, size - first) for first in range(0, size, PIECE)]
        pieces += cut
        ready += [now] * len(cut)
    shares = [step_seconds * size / sum(pieces) for size in pieces]
    buckets = [(size, size) for size in pieces]
    return hosted_step(buckets, shares, link, ready if within_backward else ()).exposed


class Streamed(NamedTuple):
    """Holds what changes where the weights of the first blocks lie on the host.

    Attributes:
        measured: the costs of all blocks.
        device: bytes more on the device, mostly less.
        gradients: bytes of those that leave it.
        host: bytes there.
        seconds: that a pass takes longer.
    """

    measured: Measured
    device: int = 0
    gradients: int = 0
    host: int = 0
    seconds: float = 0.0


def streamed(measured: Measured, count: int, link: Link) -> Streamed:
    """Returns what it changes that the weights of so many blocks lie on the host."""
    blocks = [block.streamed() for block in measured.blocks[:count]] + measured.blocks[count:]
    weights = [block.weights * (i < count) for i, block in enumerate(blocks)]
    gradients = [block.gradients * (i < count) for i, block in enumerate(measured.blocks)]
    costs = [block.levels[block.leanest] for block in blocks]
    forward, backward = [c.forward_seconds for c in costs], [c.backward_seconds for c in costs]
    slots = 1 + PREFETCH * link.is_asynchronous
    return Streamed(
        replace(measured, blocks=blocks),
        slots * max(weights, default=0) - sum(weights),
        sum(gradients),
        sum(weights) + sum(gradients),
        streamed_step(weights, gradients, forward, backward, link, PREFETCH).exposed,
    )
