"""The slots that the blocks of a model take turns in, and the order in which they are filled."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..arena import HostArena
from ..engines import engine_of
from ..files import let_pages_go
from ..passes import End, backward_passes, drop_what_is_left
from ..slabs import Slabs
from .fields import Block
from .gradients import Arrival, Way
from .slots import Memory, Slot


class Stream:
    """The slots of a device that the blocks of a model take turns in.

    Args:
        arena: that the weights and their gradients lie in.
        prefetch: how many blocks ahead a slot is filled, where copies run beside the computation.
    """

    engine_of = staticmethod(engine_of)  # another in plans

    def __init__(self, arena: HostArena, prefetch: int) -> None:
        self.arena, self.prefetch = arena, prefetch
        self._begin()

    def _begin(self) -> None:
        self.blocks: list[Block] = []  # in the order in which they were last called
        self._loaded: dict[Block, Slot] = {}  # the one used longest ago first
        self._memories: dict[torch.device, list[Memory]] = {}
        self._arrivals: list[Arrival] = []
        self._last: dict[int, Block] = {}  # of the forward pass of each thread
        self._task = -1  # the backward pass at whose end all copies are waited for
        self._visit: tuple[int, Block] | None = None  # of a backward pass, the last one
        self.root: Callable[[], nn.Module | None] = lambda: None  # the model that they are of
        # Backward passes run on a thread for each device, and any thread may call the model.
        self.lock = threading.RLock()
        self._asks = threading.Condition(self.lock)
        self._sent: dict[torch.device, tuple[int, Way]] = {}  # the last, and its backward pass
        take = partial(self.arena.take, kind="gradients", owner="blocks")
        self._slabs = Slabs(take, self.engine_of)

    def __getstate__(self) -> dict[str, Any]:
        return {"arena": self.arena, "prefetch": self.prefetch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _ahead(self, device: torch.device) -> int:
        return self.prefetch if self.engine_of(device).is_asynchronous else 0

    # ---- weights, on their way up ----------------------------------------------------------------

    def slot(self, block: Block, in_backward: bool) -> Slot:
        """Returns the slot with the weights of a block, which the device waits for, and begins to
        fill those of the blocks that are next. Until a tensor looks into it, who holds the lock
        keeps others from taking its memory."""
        with self.lock:
            task = torch._C._current_graph_task_id()
            visit = (task, block) if in_backward and task != -1 else None
            if visit is not None and visit == self._visit and block in self._loaded:
                return self._loaded[block]  # another tensor of the block that asked last
            self._visit = visit
            if block not in self.blocks:
                self.blocks.append(block)
            if in_backward:
                self._settle_at_the_end()
            else:
                self.settle_gradients()
                self._learn(block)
            slot = self._load(block, in_backward)
            place, way = self.blocks.index(block), -1 if in_backward else 1
            for k in range(place + way, place + way * (self._ahead(block.device) + 1), way):
                if 0 <= k < len(self.blocks) and self.blocks[k].device == block.device:
                    self._load(self.blocks[k], in_backward)
            slot.is_new = False
            slot.wait()
            return slot

    def _load(self, block: Block, in_backward: bool) -> Slot:
        block.settle()
        slot = self._loaded.pop(block, None)
        # A forward pass reads what the weights are now, and takes only what was fetched for it.
        if slot is None or not (slot.is_new or in_backward) or slot.versions != block.versions():
            slot = Slot(block, self._memory(block))
            if not in_backward and torch.is_grad_enabled():
                slot.begin_way()
        self._loaded[block] = slot
        return slot

    def _memory(self, block: Block) -> Memory:
        """Returns memory for a slot that nothing looks into any more. What was given to the device
        to compute until now may still use it, and copies to it come one after another."""
        device = block.device
        here = [other for other in self._loaded if other.device == device]
        for other in here[: max(0, len(here) - self._ahead(device))]:
            del self._loaded[other]
            other.let_pages_go()
        taken = [slot.memory for slot in self._loaded.values()]
        memories = self._memories.setdefault(device, [])
        for one in memories:
            if one not in taken and one.run.numel() >= block.size and not one.is_used():
                return one
        size = max(other.size for other in self.blocks if other.device == device)
        memories.append(Memory(size, device))
        return memories[-1]

    def _learn(self, block: Block) -> None:
        """Puts a block behind the one that was called before it."""
        thread = threading.get_ident()
        last, self._last[thread] = self._last.get(thread), block
        place = 0 if last is None else self.blocks.index(last) + 1
        if self.blocks.index(block) < place:
            # Another pass, before which the weights may have been written.
            for slot in self._loaded.values():
                slot.is_new = False
        if last is block or block is self.blocks[0] or self.blocks[place : place + 1] == [block]:
            return
        self.blocks.remove(block)
        self.blocks.insert(0 if last is None else self.blocks.index(last) + 1, block)

    # ---- gradients, on their way down ------------------------------------------------------------

    def host_memory(self, size: int, device: torch.device) -> Tensor:
        """Returns bytes of the arena, which go back to it with the last tensor in them."""
        slab = self._slabs.take(size, device)
        view = memoryview(slab.numpy())
        run = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(view, _give, self._slabs, slab, device).atexit = False
        return run

    def add(self, arrival: Arrival) -> None:
        """Keeps gradients that are on their way, those of one block on the device at a time."""
        with self.lock:
            for other in self._arrivals:
                other.leave()
            self._arrivals = [other for other in self._arrivals if not other.is_there] + [arrival]

    def send(self, way: Way) -> None:
        """Waits until the host has asked for the gradients that were sent before those of ``way``:
        where its steps take longer than the device computes, they do not pile up.

        Nobody would ask if the thread that runs the backward pass were this one, had left it by an
        error, or ran another within it.
        """
        task, device = torch._C._current_graph_task_id(), way.block.device
        with self._asks:
            before, self._sent[device] = self._sent.get(device), (task, way)
            if before is None or before[0] != task:
                return
            running = backward_passes()
            while (
                not before[1].is_asked_for
                and threading.get_ident() not in running
                and running
                and backward_passes() == running
            ):
                self._asks.wait(0.05)

    def ask(self, way: Way) -> None:
        """Lets the device send more."""
        with self._asks:
            way.is_asked_for = True
            self._asks.notify_all()

    def settle_gradients(self) -> None:
        """Waits for the gradients of the last block, and for those that no backward pass has asked
        for, because it raised."""
        with self.lock:
            for arrival in self._arrivals:
                arrival.sync()
                arrival.leave()
            self._arrivals.clear()
        drop_what_is_left()

    def _settle_at_the_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(End(self.settle))

    def settle(self) -> None:
        """Waits for all copies: the host may read and write weights and gradients then."""
        with self.lock:
            self.settle_gradients()
            for slot in self._loaded.values():
                slot.sync()
                slot.is_new = False
            self._last.clear()
            self._sent.clear()
            self._task, self._visit = -1, None
            for block in self.blocks:
                block.let_pages_go()

    def free(self) -> None:
        """Frees the slots, and the memory that waits for gradients."""
        with self.lock:
            self.settle()
            self._loaded.clear()
            self._memories.clear()
            self._slabs.trim()

    @property
    def slots(self) -> list[Tensor]:
        """Returns the memory of the slots that exist."""
        return [one.run for found in self._memories.values() for one in found]

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of the slots that exist."""
        return sum(run.nbytes for run in self.slots)


def _give(slabs: Slabs, slab: Tensor, device: torch.device) -> None:
    let_pages_go(slab)
    slabs.give(slab, device)
