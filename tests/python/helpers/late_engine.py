"""A copy engine that copies as late as it may, and tells when memory is used that is not ready."""

import sys

import torch
from headroom.host.engine import Engine
from torch.multiprocessing.reductions import StorageWeakRef


class Late(Engine):
    """Two queues whose copies run when somebody waits for them. Until then the target is poisoned,
    and neither side may be freed, nor the source be written.

    Attributes:
        errors: what was done too early. It is not raised, because destructors wait too.
        waits: the lines that called ``wait``.
        skipped: one of them, whose waits are not obeyed, to see that a test notices.
    """

    def __init__(self, skipped=None):
        super().__init__()
        self.errors, self.waits, self.skipped = [], set(), skipped
        self._queues = {"up": [], "down": []}
        self._count = 0

    def mark(self):
        return "mark"

    def _copy(self, queue, target, source, after):
        if "mark" not in after:
            self.errors.append("a copy does not wait for what was computed before it")
        for ticket in after:
            self.sync(ticket)
        target.fill_(0xFF)
        self._count += 1
        sides = [
            (StorageWeakRef(x.untyped_storage()), x.storage_offset()) for x in (target, source)
        ]
        size, total = source.numel(), source.sum().item()
        self._queues[queue].append((self._count, sides, size, total))
        return self._count

    def wait(self, ticket):
        line = sys._getframe(1).f_lineno
        self.waits.add(line)
        if line != self.skipped:
            self.sync(ticket)

    def sync(self, ticket):
        assert ticket is not None, "a device knows no ticket that is None"
        for queue in self._queues.values():
            if ticket in [number for number, *_ in queue]:
                while queue and queue[0][0] <= ticket:
                    self._run(*queue.pop(0)[1:])

    def finish(self):
        """Runs what nobody has waited for."""
        for queue in self._queues.values():
            while queue:
                self._run(*queue.pop(0)[1:])

    def _run(self, sides, size, total):
        found = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, _ in sides]
        if None in found:
            self.errors.append("memory was freed before it had been copied")
            return
        target, source = (
            torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,))
            for storage, (_, offset) in zip(found, sides)
        )
        if source.sum().item() != total:
            self.errors.append("the source was written before it had been copied")
        target.copy_(source)
