"""The host arena of a plan: what the states of optimizers and the levels of blocks take of it, and
what a step copies."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from .._core.overlap import laid_out
from ..host.engine import Engine, Inline
from ..host.ring import slots_with
from ..host.slabs import Slabs
from ..memory.events import Allocation
from ..param_states.paging.hosted import Hosting
from ..param_states.paging.hosted_parts import divided_grads
from ..param_states.paging.paged import Paging, Place, block_size_of
from ..param_states.paging.parts import copied_bytes
from ..param_states.paging.pipeline import Pipeline, Turn
from ..param_states.plan import Bucket, Calls
from .recorder import Recorder

_KINDS = {"gradients": "gradients", "weights": "parameters"}  # of slabs; others are of states


class PlannedPaging(Paging):
    """Counts what a step copies without cutting fakes of states into pieces: the views of all the
    pieces would take ten times as long as the rest of a plan."""

    arena: Any  # a PlannedHost, which is the engine, too

    def engine_of(self, device: torch.device) -> Engine:
        return self.arena

    def _choice(
        self, places: Mapping[Tensor, Place]
    ) -> tuple[dict[torch.device, int], set[Tensor]]:
        return super()._choice(
            {p: place for p, place in places.items() if not self.arena.steps_in_place(p)}
        )

    def _staged(
        self,
        optimizer: Any,
        group: dict[str, Any],
        bucket: Bucket,
        device: torch.device,
        stays: bool,
    ) -> tuple[Any, list[tuple[Bucket, Any]]]:
        if stays:
            return super()._staged(optimizer, group, bucket, device, stays)
        there = [owner for owner in bucket.owners if self.arena.steps_in_place(owner)]
        here = [owner for owner in bucket.owners if owner not in {*there}]
        with self.arena.off_the_device():
            self._house_missing(optimizer, there, bucket.layout, group)
        self._house_missing(optimizer, here, bucket.layout, group)
        if not here:
            return _Holding(bucket, []), []
        ring = self._ring(device, group, bucket._replace(owners=here))
        laid: list[Tensor] = []
        for owner, param, grad in zip(bucket.owners, bucket.params, bucket.grads):
            if owner in {*there}:
                continue
            home = self._homes[owner]
            up, down = copied_bytes(home, param, ring.slot_bytes, block_size_of(group))
            self.arena.bytes_up += up
            self.arena.bytes_down += down
            if home.size > ring.slot_bytes:
                laid.append(laid_out(grad, param.stride()))
        return _Holding(bucket, laid), []


class _Holding:
    """The steps of a bucket, which hold gradients until they have run."""

    def __init__(self, bucket: Bucket, grads: list[Tensor]) -> None:
        self._bucket, self._grads = bucket, grads

    def calls(self, steps: Calls) -> Calls:
        return [(self._bucket, self._grads.clear)]


class PlannedPipeline(Pipeline):
    """Counts what a step on the host copies, of whole buckets."""

    def __init__(self) -> None:
        super().__init__()
        self._away: deque[tuple[int, list[Tensor]]] = deque()  # parts, and their gradients
        self._turns: list[Turn] = []  # whose gradients wait

    def put_bucket(self, turn: Turn, parts: int) -> None:
        """Lets gradients go down, which stay on the device as long as there are slots for more."""
        bucket, host = turn.bucket, _host_of(turn)
        if turn.packed is not None:
            host.bytes_down += turn.packed.nbytes
        for owner, grad in zip(bucket.owners, bucket.grads):
            host.bytes_down += 0 if host.steps_in_place(owner) else grad.nbytes
        self._away.append((parts, bucket.grads))
        turn.bucket = bucket._replace(grads=[])
        held = slots_with(host) if host.is_asynchronous else 0
        while sum(parts for parts, _ in [*self._away][1:]) >= held and self._away:
            self._away.popleft()
        if turn.waits:
            self._turns.append(turn)
            return
        self._arrive(turn)

    def _arrive(self, turn: Turn) -> None:
        host = _host_of(turn)
        for owner, param, home in zip(turn.bucket.owners, turn.bucket.params, turn.homes):
            host.bytes_up += 0 if host.steps_in_place(owner) else param.nbytes
            self._brought.append((param, home))

    def step_waiting(self) -> None:
        self._away.clear()
        turns, self._turns = self._turns, []
        for turn in turns:
            self._arrive(turn)

    def finish(self) -> None:
        self._away.clear()
        super().finish()


def _host_of(turn: Turn) -> PlannedHost:
    host: Any = turn.engine
    return host


class PlannedHosting(Hosting):
    """Counts what a step on the host copies, whose parts are not made either."""

    pipeline_type = PlannedPipeline
    arena: Any  # a PlannedHost, which is the engine, too
    _pipeline: PlannedPipeline
    _count = 0  # of the parts of the latest bucket

    def engine_of(self, device: torch.device) -> Engine:
        return self.arena

    def _parts(self, bucket: Bucket, *how: Any) -> list[Any]:
        _, _, part_bytes, _, can_cut = how
        self._count = len(divided_grads(bucket.grads, part_bytes, can_cut))
        return []

    def _with(self, run: Turn, steps: Calls) -> Calls:
        return [(run.bucket, partial(self._put_bucket, run, self._count))]

    def _put_bucket(self, turn: Turn, parts: int) -> None:
        self._check(turn)
        self._pipeline.put_bucket(turn, parts)


class PlannedHost(Inline):
    """Counts slabs that have no memory, and copies that copy nothing: an arena and an engine.

    Attributes:
        allocations: of slabs, at the events of the recorder.
        slabs: of what blocks keep.
        weights: the parameters that are on the host.
    """

    def __init__(self, recorder: Recorder, mode: FakeTensorMode) -> None:
        super().__init__()
        self.is_asynchronous = recorder.device.type == "cuda"
        self.allocations: list[Allocation] = []
        self.slabs = Slabs(self._take_for_blocks, lambda device: self)
        self.weights: set[Tensor] = set()
        self._recorder, self._mode = recorder, mode

    def take(self, size: int, *, kind: str, owner: str, device: torch.device) -> Tensor:
        """Returns a fake of a slab."""
        with _disable_current_modes(), self._mode:
            slab = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._recorder.manage(slab)  # and it never appears on the device
        self._allocate(slab, _KINDS.get(kind, "optimizer_state"), owner)
        return slab

    def _take_for_blocks(self, size: int, device: torch.device) -> Tensor:
        with _disable_current_modes():
            slab = torch.empty(size, dtype=torch.uint8, device="meta")
        self._allocate(slab, "activations", None)
        return slab

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keeps on the host, while it lasts, what torch's ``save_on_cpu`` keeps there. A copy to
        the CPU would be one on the device: C++ is told that all fakes are on the CPU."""

        def pack(x: Tensor) -> tuple[Tensor, torch.Size, torch.dtype]:
            size = x.numel() * x.element_size()
            self.bytes_down += size
            return self._take_for_blocks(size, x.device), x.shape, x.dtype

        def unpack(packed: tuple[Tensor, torch.Size, torch.dtype]) -> Tensor:
            slab, shape, dtype = packed
            self.bytes_up += slab.numel()
            return torch.empty(shape, dtype=dtype, device=self._recorder.device)

        def begin(hooks: Any, *args: Any, **options: Any) -> None:
            saved_tensors_hooks.__init__(hooks, pack, unpack)

        with mock.patch.object(save_on_cpu, "__init__", begin):
            yield

    def _allocate(self, slab: Tensor, kind: str, owner: str | None) -> None:
        recorder = self._recorder
        allocation = Allocation(
            len(self.allocations),
            slab.numel(),
            recorder.now,
            kind=kind,
            module=recorder.module,
            op=owner,
            phase=recorder.phase,
            step=recorder.step,
        )
        self.allocations.append(allocation)
        weakref.finalize(slab, self._freed, allocation)

    def move(self, x: Tensor) -> None:
        """Counts a tensor that is on the host though no arena has it."""
        if (allocation := self._recorder.move(x)) is not None:
            allocation.id = len(self.allocations)
            self.allocations.append(allocation)
            weakref.finalize(x.untyped_storage(), self._freed, allocation)

    def _freed(self, allocation: Allocation) -> None:
        allocation.end = self._recorder.now

    def steps_in_place(self, param: Tensor) -> bool:
        """Returns whether a parameter is on the host, which is not the device, so that nothing is
        copied to step it."""
        return self.is_asynchronous and param in self.weights

    @contextmanager
    def off_the_device(self) -> Iterator[None]:
        """Counts nothing on the device, while it lasts: tensors are made on the host."""
        recorder = self._recorder
        before, recorder.is_paused = recorder.is_paused, True
        try:
            yield
        finally:
            recorder.is_paused = before

    def begin_step(self) -> None:
        """Counts the copies of the step that follows alone."""
        self.bytes_up = self.bytes_down = 0

    def up(self, target: Tensor, source: Tensor, after: Iterable[Any] = ()) -> None:
        self.bytes_up += source.numel()

    def down(self, target: Tensor, source: Tensor, after: Iterable[Any] = ()) -> None:
        self.bytes_down += target.numel()
