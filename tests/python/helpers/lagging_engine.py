"""A copy engine of a device that lags behind the host, as far as it may."""

import random

import torch
from headroom.host.engine import Engine
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0xFF  # NaN, as a float of any size


class Lagging(Engine):
    """Two queues, whose copies run when the device waits for them, as all that it computes comes
    later, or when the host does.

    Until then the target is poisoned, and neither side may be freed, nor the source be written. A
    copy that only the device has waited for is over for the device alone: the host must not write
    what goes up yet, and finds what comes down poisoned.

    Args:
        seed: lets copies also run at random, as soon as they may; None: as late as they may.

    Attributes:
        errors: what was done too early. It is not raised, because destructors wait too.
    """

    def __init__(self, seed=None):
        super().__init__()
        self.errors, self.random = [], None if seed is None else random.Random(seed)
        self._queues = {"up": [], "down": []}

    def mark(self):
        """What was computed until now has waited for these copies."""
        return tuple(c for queue in self._queues.values() for c in queue if c.is_over)

    def _copy(self, queue, target, source, after):
        if not after or not all(isinstance(ticket, tuple) for ticket in after):
            self.errors.append("a copy does not wait for what was computed before it")
        copy = _Copy(queue, target, source, self.errors)
        copy.before_it = [c for ticket in after for c in ticket]
        self._queues[queue].append(copy)
        if self.random is not None:
            for name in self._queues:
                for other in self._queues[name][: self.random.randrange(3)]:
                    other.end_on_device()
                if self._queues[name] and self.random.random() < 0.3:
                    self.sync(self._queues[name][0])
        return copy

    def wait(self, ticket):
        for copy in self._until(ticket):
            copy.end_on_device()

    def sync(self, ticket):
        done = self._until(ticket)
        del self._queues[ticket.queue][: len(done)]
        for copy in done:
            for other in copy.before_it:
                self.sync(other)
            copy.end()

    def _until(self, ticket):
        queue = self._queues[ticket.queue]
        return queue[: queue.index(ticket) + 1] if ticket in queue else []

    def finish(self):
        """Ends what nobody has waited for."""
        for queue in self._queues.values():
            while queue:
                queue.pop(0).end()


class _Copy:
    def __init__(self, queue, target, source, errors):
        self.queue, self.errors, self.size = queue, errors, source.numel()
        target.fill_(POISON)
        self.sides = [
            (StorageWeakRef(x.untyped_storage()), x.storage_offset()) for x in (target, source)
        ]
        self.before = source.clone()
        self.is_over = self.has_failed = False  # for the device

    def _side(self, index):
        ref, first = self.sides[index]
        storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        if storage is None:
            if not self.has_failed:
                self.errors.append(f"memory was freed before it had been copied {self.queue}")
            self.has_failed = True
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, first, (self.size,))

    def _check_source(self):
        source = self._side(1)
        if source is not None and not torch.equal(source, self.before):
            self.errors.append(f"what goes {self.queue} was written before it had been copied")

    def end_on_device(self):
        if self.is_over:
            return
        self.is_over = True
        self._check_source()
        if self.queue == "up" and (target := self._side(0)) is not None:
            target.copy_(self.before)

    def end(self):
        self.end_on_device()
        if self.queue == "up":
            self._check_source()
        elif (target := self._side(0)) is not None:
            target.copy_(self.before)
