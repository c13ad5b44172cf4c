"""The weights of a block on a device, and the memory that blocks take turns in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine import Ticket
from .fields import Block
from .gradients import Arrive, Way


class Memory:
    """Memory of the device that slots take turns in."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.run = torch.empty(size, dtype=torch.uint8, device=device)
        self._alone = self._uses()  # those of this object

    def _uses(self) -> int:
        return torch._C._storage_Use_Count(self.run.untyped_storage()._cdata)

    def is_used(self) -> bool:
        """Returns whether a tensor looks into it."""
        return self._uses() > self._alone


class Slot:
    """The weights of a block on a device.

    Attributes:
        is_new: whether they were fetched for a call that is still to come.
    """

    def __init__(self, block: Block, memory: Memory) -> None:
        self._up: Ticket = None
        self._is_there = False
        self.block, self.memory = block, memory
        self.versions, self.is_new = block.versions(), True
        self._way: tuple[Way, tuple[Tensor, ...]] | None = None  # of a call still to come
        self._engine = block.stream.engine_of(block.device)
        slab = block.slab
        if slab.numel():
            ready = self._engine.mark()
            target = memory.run[: slab.numel()]
            with torch.inference_mode(False):
                self._up = self._engine.up(target, slab, after=(ready,))

    def __del__(self) -> None:
        if not self._is_there:  # nobody used it
            self.sync()

    def begin_way(self) -> tuple[Way, tuple[Tensor, ...]]:
        """Makes the way of a call's gradients, and returns it with the tensors that it begins at. A
        backward pass takes one that was made before others after those: after the pass of the block
        in front, which is computed while gradients are copied."""
        trained = self.block.trained()
        way = Way(trained)
        self._way = way, (Arrive.apply(way, *trained) if trained else ())
        return self._way

    def take_way(self) -> tuple[Way, tuple[Tensor, ...]]:
        found = self._way
        if found is None or found[0].params != self.block.trained():
            found = self.begin_way()
        self._way = None
        found[0].block = self.block
        return found

    def wait(self) -> None:
        """Lets what is computed here from now on wait for the weights."""
        self._is_there = True
        if (up := self._up) is not None:
            self._engine.wait(up)

    def sync(self) -> None:
        """Waits, on the host, until the arena has been read."""
        if (up := self._up) is not None:
            self._engine.sync(up)
            self._up, self._is_there = None, True
