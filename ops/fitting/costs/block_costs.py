"""Measurements of a model: the costs of its blocks at their levels, and the times of passes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...host.saved import MIN_BYTES
from ...nn.steps import save_level
from ...step.pass_seconds import PassSeconds


def is_on_host(level: str) -> bool:
    """Returns whether blocks at a level hold on the host what they keep."""
    return save_level(level).on_host


def is_exact(level: str) -> bool:
    """Returns whether blocks at a level hold what they keep on the device, as it is."""
    return level == save_level(level).exact


@dataclass(frozen=True)
class LevelCost:
    """The costs of a block at a level; the bytes are those of
    :class:`headroom.memory.alone.Bytes`.

    Attributes:
        held, backward, forward: bytes, as in :class:`headroom.fitting.search.knapsack.Level`.
        backward_released: ``backward`` where gradients of parameters do not stay: they are
            released, or added to those of an earlier micro-batch.
        kept: bytes besides ``held`` that stay until the forward pass of the model has ended: of
            weights that autocast has cast, and of caches.
        forward_seconds, backward_seconds: of the passes.
        moved: bytes that the host holds between the passes, of so many ``storages``; ``held`` is
            negative where arguments leave the device.
    """

    held: int
    backward: int
    backward_released: int
    forward: int
    kept: int
    forward_seconds: float
    backward_seconds: float
    moved: int = 0
    storages: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def scaled(self, factor: float) -> LevelCost:
        """Returns the same with other seconds."""
        forward, backward = factor * self.forward_seconds, factor * self.backward_seconds
        return replace(self, forward_seconds=forward, backward_seconds=backward)


@dataclass(frozen=True)
class BlockCosts:
    """The costs of a block.

    Attributes:
        name: of the module in the model.
        kind: the same for blocks that are alike, and for no others of the model.
        levels: from the one that keeps the most on; behind them those in 8 bits, and behind these
            all of them on the host, if that may be used.
        gradients: bytes of the gradients of its parameters.
        largest: of these gradients.
        weights: bytes of its parameters and buffers.
    """

    name: str
    kind: int
    levels: dict[str, LevelCost]
    gradients: int
    largest: int
    weights: int = 0

    def scaled(self, factor: float) -> BlockCosts:
        """Returns the same with other seconds at all levels."""
        return replace(self, levels={n: cost.scaled(factor) for n, cost in self.levels.items()})

    @property
    def leanest(self) -> str:
        """Returns the level that keeps the least, on the device and as it is."""
        return [name for name in self.levels if is_exact(name)][-1]

    @property
    def kept(self) -> int:
        """Returns the most of ``kept`` at any level."""
        return max(cost.kept for cost in self.levels.values())

    def streamed(self) -> BlockCosts:
        """Returns what it costs where its weights and gradients are on the host: a gradient leaves
        when it is there."""
        levels = {n: replace(c, backward=c.backward_released) for n, c in self.levels.items()}
        return replace(self, levels=levels, gradients=0)

    def part(self, count: int) -> BlockCosts:
        """Returns what it costs in one of ``count`` micro-batches. Levels whose tensors are then
        too small to leave the device are not among them."""

        def share(size: int, whole: int = 0) -> int:
            whole = min(max(size, 0), whole)
            return whole + -(-(size - whole) // count)

        levels = {
            name: replace(
                cost.scaled(1 / count),
                held=share(cost.held),
                backward=share(cost.backward, self.gradients),
                backward_released=share(cost.backward_released, self.largest),
                forward=share(cost.forward),
                moved=share(cost.moved),
            )
            for name, cost in self.levels.items()
            if cost.moved >= count * cost.storages * MIN_BYTES
        }
        return replace(self, levels=levels)


@dataclass(frozen=True)
class Measured:
    """The costs of the blocks of a model, and the times of its passes.

    Attributes:
        blocks: in the order of the forward pass; those that a step does not call are left out.
        whole: the seconds of a forward and a backward pass with all blocks at their leanest.
        seconds_of_rest: of those, what is not of the blocks: before, behind and between them.
    """

    blocks: list[BlockCosts] = field(default_factory=list)
    whole: PassSeconds = PassSeconds(0.0, 0.0)
    seconds_of_rest: float = 0.0

    def part(self, count: int) -> Measured:
        """Returns what the blocks cost in one of ``count`` micro-batches.

        Bytes are those of the batch divided by their number, but for gradients of parameters, whose
        size is the same: all of them where they stay, or else one at a time. Seconds are divided
        too.
        """
        return Measured([block.part(count) for block in self.blocks])
