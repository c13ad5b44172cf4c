"""Keeps the states of an optimizer's parameters in a host arena, with a copy of the weights, and
steps there: gradients go down, the op of the CPU runs, and weights go up.

A step is a pipeline over parts of the parameters. With released gradients it runs beside the
backward pass. Where the step is clipped by the norm of all gradients, or may be skipped as a whole,
these go down beside the backward pass, wait on the host, and are stepped when all are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._core.dtensor import local_part
from ..._core.names import name_of
from ..._core.overlap import is_dense, laid_out, place_in_memory
from ...host import cutting
from ...host.ring import aligned, slots_with
from ..plan import Bucket, Call, Calls, StepScalars
from ..states import Layout
from .homes import is_cuttable
from .hosted_parts import HostedHome, HostPart, Slots, parts_of, with_weights
from .paged import BUCKETS, INLINE_BYTES, Paging, Place, block_size_of, states_of
from .pipeline import Pipeline, Turn

GRADIENTS = "gradients"
# Of gradients in a slot. Between two parts the thread that begins copies and the one that steps
# wait for each other's Python code, half a millisecond.
SLOT_BYTES = 32 << 20
MAIL = 64  # bytes for the scalars of a bucket
MAILS = 64  # of these at a time


class HostingMemory(NamedTuple):
    """Bytes in the arena of a step on the host."""

    host: int  # of states and weights
    gradients: int  # of what gradients and scalars pass through, and of gradients that wait


class Hosting(Paging):
    """The states of an optimizer that is stepped on the host.

    Attributes:
        waits: whether gradients wait on the host, until :meth:`step_waiting` or :meth:`discard`.
    """

    home_type = HostedHome
    pipeline_type = Pipeline
    _homes: dict[Tensor, HostedHome]

    def _forget(self) -> None:
        super()._forget()
        self.waits = False
        self._pipeline = self.pipeline_type()
        self._all_slots: dict[torch.device, Slots] = {}
        self._sizes: dict[torch.device, int] = {}  # of parts
        self._mails: list[Tensor] = []  # free
        self._lent: list[Tensor] = []
        # Where the ops read the scalars of gradients that wait, and what is known of these.
        self._verdicts: dict[torch.device, tuple[Tensor, StepScalars]] = {}

    def _end(self) -> None:
        self._pipeline.end()
        super()._end()

    # ---- where states lie -----------------------------------------------------------------------

    def _choice(
        self, places: Mapping[Tensor, Place]
    ) -> tuple[dict[torch.device, int], set[Tensor]]:
        return {}, set()

    def _stays(self, param: Tensor, layout: Layout) -> bool:
        return False

    def _is_housed(self, param: Tensor, state: Mapping[Any, Any], names: tuple[str, ...]) -> bool:
        if not super()._is_housed(param, state, names):
            return False
        local, weights = local_part(param), self._homes[param].weights
        form = local.shape, local.stride(), local.dtype
        return form == (weights.shape, weights.stride(), weights.dtype)

    def _house(self, places: list[Place], state: dict[Any, Any], optimizer: Any) -> None:
        whole = []
        for place in places:
            local = local_part(place.param)
            strides = (f.stride for f in place.fields if f.name in place.layout.param_like)
            is_alike = is_dense(local) and all(stride == local.stride() for stride in strides)
            if local.numel() and not is_alike:
                name = name_of(optimizer.param_groups, place.param)
                raise ValueError(
                    f'offload="step" copies weights to the host byte by byte, but {name} has gaps '
                    "in memory, or lies there in another order than its state; make it contiguous "
                    'before the optimizer\'s first step, or use offload="state"'
                )
            whole.append(place._replace(fields=with_weights(place.fields, local)))
        super()._house(whole, state, optimizer)

    def adopt(self, optimizer: Any, groups: Any = None, state: Any = None) -> None:
        self.discard()
        super().adopt(optimizer, groups, state)
        self._sizes.clear()

    def release(self, optimizer: Any) -> None:
        self.discard()
        executor = self._pipeline.executor
        super().release(optimizer)
        if executor is not None:
            executor.shutdown()

    def wait(self) -> None:
        """Waits until what was begun on the host has been stepped, and its weights have gone up."""
        self._pipeline.wait()
        super().wait()

    def memory(self, optimizer: Any) -> HostingMemory:
        """Returns the bytes in the arena, by what they are for."""
        passed = sum(slots.slab.numel() for slots in self._all_slots.values())
        passed += self._pipeline.written.size + MAIL * len(self._mails + self._lent)
        waiting = [home.gradient for home in self._homes.values() if home.gradient is not None]
        passed += sum(aligned(gradient.numel()) for gradient in waiting)
        return HostingMemory(sum(home.size for home in self._homes.values()), passed)

    def _take(self, size: int, optimizer: Any, device: torch.device) -> Tensor:
        owner = type(optimizer).__name__
        return self.arena.take(size, kind=GRADIENTS, owner=owner, device=device)

    # ---- the calls of a step --------------------------------------------------------------------

    def _staged(
        self,
        optimizer: Any,
        group: dict[str, Any],
        bucket: Bucket,
        device: torch.device,
        stays: bool,
    ) -> tuple[Any, list[tuple[Bucket, Any]]]:
        """Returns what the steps of a bucket have in common, and its parts on the host."""
        self._house_missing(optimizer, bucket.owners, bucket.layout, group)
        grads = [laid_out(grad, param.stride()) for param, grad in zip(bucket.params, bucket.grads)]
        bucket = bucket._replace(grads=grads)
        homes = [self._homes[owner] for owner in bucket.owners]
        can_cut = [
            is_cuttable(bucket.layout, owner, group, home.fields[:-1])
            for owner, home in zip(bucket.owners, homes)
        ]
        if self.waits:
            slots, part_bytes = None, max(self._part_bytes(optimizer, device), 1)
            self._add_gradients(optimizer, device, homes, grads)
        else:
            slots = self._slots_for(optimizer, device, grads, can_cut)
            part_bytes = slots.slot_bytes
        parts = self._parts(bucket, homes, slots, part_bytes, block_size_of(group), can_cut)
        engine = self.engine_of(device)
        turn = Turn(optimizer, bucket, engine, device, homes, parts, self.waits)
        staged = [(part.bucket(bucket), part) for part in parts]
        return turn, [(one, states_of(one, part.states)) for one, part in staged]

    def _parts(self, bucket: Bucket, *how: Any) -> list[HostPart]:
        """Returns the parts of a bucket: those of the step before, if nothing has moved."""
        dtypes = [grad.dtype for grad in bucket.grads]
        made_of = how, dtypes, [*map(place_in_memory, bucket.owners)]
        return self._pieces_made_of(made_of, bucket, partial(parts_of, bucket, *how))

    def _slots_for(
        self, optimizer: Any, device: torch.device, grads: Sequence[Tensor], can_cut: Sequence[bool]
    ) -> Slots:
        """Returns the slots for gradients of a device, which are made anew if a parameter that is
        not cut needs a larger one."""
        needed = max(
            grad.element_size() * (min(grad.numel(), cutting.CUT) if can else grad.numel())
            for can, grad in zip(can_cut, grads)
        )
        slots = self._all_slots.get(device)
        if slots is None or slots.slot_bytes < needed:
            size = aligned(max(self._part_bytes(optimizer, device), needed, 1), 512)
            slab = self._take(slots_with(self.engine_of(device)) * size, optimizer, device)
            slots = self._all_slots[device] = Slots(slab, size)
        return slots

    def _add_gradients(
        self, optimizer: Any, device: torch.device, homes: list[HostedHome], grads: list[Tensor]
    ) -> None:
        """Makes places where gradients wait, as large as these are."""
        missing = [
            (home, grad.nbytes)
            for home, grad in zip(homes, grads)
            if home.gradient is None or home.gradient.numel() != grad.nbytes
        ]
        if not missing:
            return
        self._pieces.clear()  # which have other places
        slab, first = self._take(sum(aligned(n) for _, n in missing), optimizer, device), 0
        for home, size in missing:
            home.gradient = slab[first : first + size]
            first += aligned(size)

    def _part_bytes(self, optimizer: Any, device: torch.device) -> int:
        """Returns the bytes of gradients of a part, where no parameter needs more."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        if device in self._sizes:
            return self._sizes[device]
        every = (p for group in optimizer.param_groups for p in group["params"])
        held = sum(local_part(p).nbytes for p in every if p.device == device)
        most = SLOT_BYTES if self.engine_of(device).is_asynchronous else INLINE_BYTES
        self._sizes[device] = min(most, held // BUCKETS)
        return self._sizes[device]

    def _given(self, run: Turn, scalars: StepScalars) -> StepScalars:
        """Returns the scalars as the ops read them, on the host, where they arrive before the
        gradients do, or, where those wait, are written later."""
        if run.waits:
            if run.device not in self._verdicts:
                zero, one = (torch.full((), x, device=run.device) for x in (0.0, 1.0))
                self._verdicts[run.device] = self._mail(run), scalars.joined(zero, one)
            mail, scalars = self._verdicts[run.device]
        elif any(scalar is not None for scalar in scalars):
            run.packed = packed(scalars, run.device)
            mail = run.mail = self._mail(run)[: len(run.packed)]
        else:
            return scalars
        there = iter(mail)
        return StepScalars(*(None if scalar is None else next(there) for scalar in scalars))

    def _mail(self, run: Turn) -> Tensor:
        """Returns memory on the host for the scalars of a bucket."""
        if not self._mails:
            slab = self._take(MAIL * MAILS, run.optimizer, run.device)
            self._mails += slab.split(MAIL)
        self._lent.append(self._mails.pop())
        return self._lent[-1].view(torch.float32)

    def _with(self, run: Turn, steps: Sequence[tuple[Bucket, Call]]) -> Calls:
        return [
            (bucket, partial(self._put, run, part, step))
            for part, (bucket, step) in zip(run.parts, steps)
        ]

    def _put(self, turn: Turn, part: HostPart, step: Call) -> None:
        try:
            self._check(turn)
            self._pipeline.put(turn, part, step)
        except BaseException:
            self._abandon()
            raise

    def _check(self, turn: Turn) -> None:
        take = partial(self._take, optimizer=turn.optimizer, device=turn.device)
        self._pipeline.written.check(turn.device, turn.engine, self._homes, take)

    def finish(self) -> None:
        try:
            self._pipeline.finish()
        except BaseException:
            self._abandon()
            raise
        self._reset()

    def _reset(self) -> None:
        if not self._pipeline.waiting:
            self._pipeline.written.restart()
            self._mails += self._lent
            self._lent = []

    def _abandon(self) -> None:
        try:
            self._pipeline.abandon()
        finally:
            self._reset()

    # ---- gradients that wait --------------------------------------------------------------------

    def step_waiting(self, found_inf: Tensor, clip_coef: Tensor | None) -> None:
        """Steps with the gradients that wait, clipped by this factor, unless the flag is not 0."""
        verdicts, self._verdicts = self._verdicts, {}
        try:
            self._pipeline.let_leave()
            for device, (mail, scalars) in verdicts.items():
                values = packed(scalars.joined(found_inf, clip_coef), device)
                mail[: len(values)].copy_(values)  # which waits for the device
            self._pipeline.step_waiting()
        except BaseException:
            self._abandon()
            raise
        self.finish()

    def discard(self) -> None:
        """Forgets the gradients that wait."""
        self._pipeline.discard()
        self._verdicts = {}
        self._abandon()

    def drop_gradients(self) -> None:
        """Frees the memory in which gradients wait, which are forgotten."""
        self.discard()
        self._pieces.clear()  # which have it
        for home in self._homes.values():
            home.gradient = None


def packed(scalars: StepScalars, device: torch.device) -> Tensor:
    """Returns the scalars that there are, in one tensor on a device."""
    found = [x.detach().reshape(()) for x in scalars if x is not None]
    return torch.stack([x.to(device, torch.float32) for x in found])
