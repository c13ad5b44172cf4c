"""Keeps the sums of gradients in a host arena between micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .._core.dtensor import local_part, on_meta, spec_of, with_spec
from .._core.overlap import flat, laid_out
from ..functional.accumulate import accumulate_
from ..host.arena import HostArena
from ..host.cutting import divided, equal_cuts
from ..host.engine import Engine
from ..host.engines import engine_of
from ..host.ring import Copy, Piece, Place, Ring, Run, aligned

SLOT_BYTES = 8 << 20


class Sum(Place):
    """The place of a parameter's sum, and of its compensation if it has one.

    Attributes:
        holds: whether something has been added to it since it was last taken.
    """

    def __init__(
        self, like: Tensor, slab: Tensor, first: int, compensated: bool, engine: Engine
    ) -> None:
        local = local_part(like)
        self.length, self.width = local.numel(), local.element_size()
        super().__init__(slab, first, (1 + compensated) * aligned(local.nbytes), engine)
        self._form = local.shape, local.stride()
        self._spec, self.dtype = spec_of(like), local.dtype
        self.compensated, self.holds = compensated, False

    def first_of(self, number: int) -> int:
        """Returns the first byte of the sum (0), or of the compensation (1)."""
        return self.first + number * (self.size // 2)

    def whole(self, memory: Tensor, first: int) -> Tensor:
        """Returns the tensor in memory of its dtype, of which it takes the bytes from ``first``."""
        local = memory.view(self.dtype).as_strided(*self._form, first // self.width)
        return with_spec(local, self._spec)

    def tensor(self, number: int) -> Tensor:
        """Returns the sum in the arena (0), or the compensation (1)."""
        return self.whole(self.slab, self.first_of(number))

    def flat(self, x: Tensor) -> Tensor:
        """Returns the elements of a tensor in the order of those of the sum."""
        _, stride = self._form
        return flat(laid_out(local_part(x), stride))


class HostSums:
    """Sums in a host arena. The device adds gradients to them while they pass through a ring."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._sums: dict[Tensor, Sum] = {}
        self._rings: dict[torch.device, Ring] = {}

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.wait()  # the memory that copies use is about to be freed

    def wait(self) -> None:
        """Waits until the copies to the arena have ended."""
        for place in self._sums.values():
            place.wait()

    def clear(self) -> None:
        """Forgets what has been added. The memory stays for the next sums."""
        for place in self._sums.values():
            place.holds = False

    def house(
        self,
        params: Sequence[Tensor],
        forms: Sequence[Tensor],
        dtype: torch.dtype,
        compensated: bool,
    ) -> None:
        """Makes places for the sums of parameters on one device that have none.

        Args:
            forms: tensors of the layouts of the sums: their gradients.

        Raises:
            HostMemoryError: the arena has no room. Nothing has been changed then.
        """
        missing = [
            (param, torch.zeros_like(on_meta(form), dtype=dtype))
            for param, form in zip(params, forms)
            if param not in self._sums or self._sums[param].dtype != dtype
        ]
        if not missing:
            return
        device = params[0].device
        size = sum((1 + compensated) * aligned(local_part(like).nbytes) for _, like in missing)
        slab = self._arena.take(size, kind="gradients", owner="GradAccumulator", device=device)
        first, engine = 0, engine_of(device)
        for param, like in missing:
            place = self._sums[param] = Sum(like, slab, first, compensated, engine)
            first += place.size

    def tensors(self, param: Tensor) -> list[Tensor]:
        """Returns the sum of a parameter and its compensation, if it has one, in the arena."""
        place = self._sums[param]
        return [place.tensor(number) for number in range(1 + place.compensated)]

    def add(self, params: Sequence[Tensor], factor: float) -> None:
        """Adds the gradients of parameters on one device, which have places of one dtype, times a
        factor."""
        ring = self._ring(params[0].device)
        places = [self._sums[param] for param in params]
        grads = [place.flat(param.grad) for place, param in zip(places, params)]

        def cuts(at: int) -> Sequence[slice]:
            each = places[at].width * (1 + places[at].compensated)
            return equal_cuts(places[at].length, ring.slot_bytes // each)

        pieces: list[_Part] = []
        for held in divided([place.size for place in places], ring.slot_bytes, cuts):
            pieces.append(_Part(ring.next_slot()))
            for at, elements in held:
                pieces[-1].add(ring, places[at], grads[at], elements)
            pieces[-1].close(ring)
        run = Run(ring, pieces)
        for index, piece in enumerate(pieces):
            run.step(index, partial(piece.step, factor))
        for param in params:
            self._sums[param].holds = True

    def put(self, param: Tensor, values: Sequence[Tensor]) -> None:
        """Writes a sum, and its compensation if there is one, to their places."""
        place = self._sums[param]
        place.wait()
        for target, value in zip(self.tensors(param), values):
            local_part(target).copy_(local_part(value))
        place.holds = True

    def brought(self, param: Tensor) -> Tensor:
        """Returns the sum of a parameter on its device."""
        place, engine = self._sums[param], engine_of(param.device)
        size = place.length * place.width
        memory = torch.empty(size, dtype=torch.uint8, device=param.device)
        # The memory may have been freed by work that still runs.
        after = [ticket for ticket in (engine.mark(), place.written) if ticket is not None]
        engine.wait(engine.up(memory, place.slab[place.first : place.first + size], after))
        return place.whole(memory, 0)

    def _ring(self, device: torch.device) -> Ring:
        if device not in self._rings:
            self._rings[device] = Ring(device, SLOT_BYTES, engine_of(device))
        return self._rings[device]


class _Part(Piece):
    """Parts of sums, which fill a slot, and the gradients that are added to them."""

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self._columns: tuple[list[Tensor], ...] = [], [], []  # sums, compensations, gradients
        self._new: list[Tensor] = []

    def add(self, ring: Ring, place: Sum, grad: Tensor, elements: slice | None) -> None:
        """Adds a sum, or some of its elements."""
        first, last, _ = (elements or slice(None)).indices(place.length)
        size, offset = (last - first) * place.width, first * place.width
        for number in range(1 + place.compensated):
            run = ring.slots[self.slot][self.filled : self.filled + size].view(place.dtype)
            self._columns[number].append(run)
            copy = Copy(self.filled, place.slab, place.first_of(number) + offset, size)
            self.down.append(copy)
            if place.holds:
                self.up.append(copy)
            else:
                self._new.append(run)
            self.filled += aligned(size)
        self._columns[2].append(grad[first:last])
        self.places.append(place)

    def step(self, factor: float) -> None:
        """Adds the gradients to what is in the slot."""
        sums, compensations, grads = self._columns
        for run in self._new:
            run.zero_()
        if sums[0].dtype == torch.float64:
            torch._foreach_add_(sums, grads, alpha=factor)
        else:
            accumulate_(sums, grads, compensations=compensations, factor=factor)
