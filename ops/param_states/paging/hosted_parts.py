"""Divides the parameters of a step on the host into parts, and says where their gradients lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._core.dtensor import local_part
from ..._core.overlap import bytes_of, flat
from ...host import cutting
from ...host.engine import Engine
from ...host.ring import Runs, aligned
from ..plan import Bucket
from ..states import STEP
from .homes import Field, Home, size_of, taken_by_ops

WEIGHTS = "weights"


def with_weights(fields: tuple[Field, ...], local: Tensor) -> tuple[Field, ...]:
    """Returns the fields of a state, and that of a copy of the weights behind them."""
    size = local.numel() * local.element_size()
    weights = Field(WEIGHTS, size_of(fields), size, local.shape, local.stride(), local.dtype)
    return *fields, weights


class HostedHome(Home):
    """The place of a parameter's state and of a copy of its weights in an arena.

    Attributes:
        weights: the copy.
        sums: checksums of the weights on the device when the two were last equal; None: they may
            differ.
        gradient: bytes for the gradient where it waits until all are known.
    """

    def __init__(self, slab: Tensor, first: int, fields: tuple[Field, ...], engine: Engine) -> None:
        super().__init__(slab, first, fields, engine)
        self.weights = self.views.pop(WEIGHTS)
        self.sums: Tensor | None = None
        self.gradient: Tensor | None = None


class Slot:
    """Memory on the host for the gradients of a part on their way to its step.

    Attributes:
        user: the step that has it, if any.
    """

    def __init__(self, run: Tensor) -> None:
        self.run, self.user = run, None


class Slots:
    """Slots that parts take in turn."""

    def __init__(self, slab: Tensor, slot_bytes: int) -> None:
        self.slab, self.slot_bytes = slab, slot_bytes
        self._slots = [*map(Slot, slab.split(slot_bytes))]
        self._turn = 0

    def next_slot(self) -> Slot:
        """Returns the slot for the next part."""
        slot, self._turn = self._slots[self._turn], (self._turn + 1) % len(self._slots)
        return slot


class HostPart:
    """Parameters, or a part of one, whose gradients are stepped together.

    Attributes:
        slot: that their gradients fill; None: these lie where they wait.
        begins: the positions in the bucket of parameters whose first elements are here.
        ends: those of parameters whose last elements are.
        ups: the bytes of weights on the device, and those on the host that go there.
        states: of each of the op's parameters, as it takes them.
        written: what is written on the device.
    """

    def __init__(self, slot: Slot | None) -> None:
        self.slot, self._filled = slot, 0
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.ups: list[Runs] = []
        self.states: dict[Tensor, dict[str, Tensor]] = {}
        self.written: list[Tensor] = []
        self._owners: list[Tensor] = []
        self._params: list[Tensor] = []
        self._grads: list[Tensor] = []
        # Of each, its position in the bucket, its elements, and the bytes of its gradient here.
        self._elements: list[tuple[int, slice, Tensor]] = []
        self._counts: list[tuple[Tensor, Tensor]] = []

    def add(
        self, home: HostedHome, bucket: Bucket, at: int, block_size: int, part: slice | None
    ) -> None:
        """Adds the parameter at a position of a bucket, or the elements of a part of it."""
        local, grad, weights = bucket.params[at], bucket.grads[at], home.weights
        elements = slice(0, local.numel()) if part is None else part
        first, size = (count * grad.element_size() for count in (elements.start, elements.stop))
        size -= first
        if self.slot is None:
            run = home.gradient[first : first + size]
        else:
            run = self.slot.run[self._filled : self._filled + size]
            self._filled = aligned(self._filled + size)
        typed = run.view(grad.dtype)
        fields = home.fields[:-1]
        if part is None:
            here = typed.as_strided(weights.shape, weights.stride())
            states = taken_by_ops(home.views, weights, block_size)
        else:
            here = typed
            states = {one.name: self._part_of(home, one, elements, block_size) for one in fields}
            weights = flat(weights)[elements]
        if elements.start == 0:
            self.begins.append(at)
        if elements.stop == local.numel():
            self.ends.append(at)
        self._elements.append((at, elements, run))
        self.ups.append((bytes_of(flat(local)[elements]), bytes_of(flat(home.weights)[elements])))
        self.written.append(local)
        self._owners.append(bucket.owners[at])
        self._params.append(weights)
        self._grads.append(here)
        self.states[weights] = states

    def _part_of(self, home: HostedHome, field: Field, part: slice, block_size: int) -> Tensor:
        whole = local_part(home.views[field.name])
        if field.name != STEP.name:
            begin, end = field.elements(part.start, part.stop, block_size)
            return flat(whole)[begin:end]
        if part.stop == home.weights.numel():
            return whole
        # All parts read the same count of steps, and each adds one, but for the last to a copy.
        copy = torch.zeros_like(whole)
        self._counts.append((copy, whole))
        return copy

    @property
    def positions(self) -> list[int]:
        """Returns the positions in the bucket of the parameters."""
        return [at for at, *_ in self._elements]

    def bucket(self, whole: Bucket) -> Bucket:
        """Returns what an op steps on the host."""
        return Bucket(whole.layout, self._owners, self._params, self._grads)

    def sources(self, grads: Sequence[Tensor]) -> list[Runs]:
        """Returns the bytes of gradients of the bucket, and those in the slot where they go."""
        return [
            (bytes_of(flat(grads[at])[elements]), here)
            for at, elements, here in self._elements
            if here.numel()
        ]

    def copy_counts(self) -> None:
        """Gives parts that are not the last a copy of the count of steps."""
        for copy, count in self._counts:
            copy.copy_(count)


def parts_of(
    bucket: Bucket,
    homes: Sequence[HostedHome],
    slots: Slots | None,
    part_bytes: int,
    block_size: int,
    can_cut: Sequence[bool],
) -> list[HostPart]:
    """Returns the parameters of a bucket in parts whose gradients fit in a slot, or, where they
    have no slots, would."""
    parts: list[HostPart] = []
    for held in divided_grads(bucket.grads, part_bytes, can_cut):
        parts.append(HostPart(None if slots is None else slots.next_slot()))
        for at, elements in held:
            parts[-1].add(homes[at], bucket, at, block_size, elements)
    return parts


def divided_grads(
    grads: Sequence[Tensor], part_bytes: int, can_cut: Sequence[bool]
) -> list[cutting.Held]:
    """Returns for each part the positions of its gradients, and which elements of each."""

    def cuts(at: int) -> Sequence[slice | None]:
        grad = grads[at]
        return (
            cutting.equal_cuts(grad.numel(), part_bytes // grad.itemsize) if can_cut[at] else [None]
        )

    return cutting.divided([grad.nbytes for grad in grads], part_bytes, cuts)
