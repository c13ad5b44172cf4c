"""Says how much longer a step takes for what the host does, by simulations of its link."""

from __future__ import annotations

from collections.abc import Sequence

from ...host.schedule import hosted_step, streamed_step
from ...host.simulation import Link
from .block_costs import BlockCosts

PIECE = 16 << 20  # bytes of gradients that leave together


def hosted_seconds(
    blocks: Sequence[BlockCosts],
    trained: int,
    step_seconds: float,
    link: Link,
    *,
    within_backward: bool,
) -> float:
    """Returns the seconds that a step on the host adds to the passes.

    Args:
        blocks: in the order of the forward pass.
        trained: bytes of all gradients, which those of the weights are taken to be, too.
        step_seconds: of the host, for all of them.
        within_backward: whether gradients are released as soon as they are there.
    """
    sizes = [block.gradients for block in reversed(blocks)]
    sizes.append(max(0, trained - sum(sizes)))  # the embedding, whose gradient comes last
    backward = [block.levels[block.leanest].backward_seconds for block in reversed(blocks)] + [0.0]
    pieces: list[int] = []
    ready: list[float] = []
    now = 0.0
    for size, seconds in zip(sizes, backward):
        now += seconds
        cut = [min(PIECE, size - first) for first in range(0, size, PIECE)]
        pieces += cut
        ready += [now] * len(cut)
    shares = [step_seconds * size / max(1, sum(pieces)) for size in pieces]
    sizes_of_buckets = [(size, size) for size in pieces]
    return hosted_step(sizes_of_buckets, shares, link, ready if within_backward else ()).exposed


def streamed_seconds(
    blocks: Sequence[BlockCosts],
    levels: Sequence[str],
    weights: Sequence[int],
    trained: Sequence[int],
    link: Link,
) -> float:
    """Returns the seconds that one pass takes longer whose blocks fetch their weights.

    Args:
        blocks: in the order of the forward pass.
        levels: of each.
        weights: the bytes of each that are on the host.
        trained: the bytes of the gradients of each that go there.
    """
    costs = [block.levels[level] for block, level in zip(blocks, levels, strict=True)]
    forward, backward = [c.forward_seconds for c in costs], [c.backward_seconds for c in costs]
    return streamed_step(weights, trained, forward, backward, link).exposed
