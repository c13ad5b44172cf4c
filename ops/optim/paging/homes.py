"""Says where the state of a parameter lies in a run of bytes: in an arena, or in a slot of a
ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..._core.overlap import is_dense
from ...host.engine import Engine, Ticket
from ..block_scales import ABSMAXS
from ..states import STEP, Layout, Slot

ALIGNMENT = 64  # of tensors in a run of bytes; kernels want 16
PART = 1 << 20  # elements


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """Returns a size rounded up to a multiple."""
    return -(-size // to) * to


class Field(NamedTuple):
    """A tensor of the state of a parameter."""

    name: str
    first: int  # byte in the run
    size: int  # in bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, run: Tensor, first: int) -> Tensor:
        """Returns the tensor in memory of its dtype, in which the state begins at a byte."""
        place = run.storage_offset() + (first + self.first) // self.dtype.itemsize
        return run.as_strided(self.shape, self.stride, place)

    def on(self, device: torch.device) -> Tensor:
        """Returns a new tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def elements(self, first: int, last: int, block_size: int) -> tuple[int, int]:
        """Returns the first of its elements that belong to a range of those of the parameter, and
        the one after the last."""
        if self.name == STEP.name:
            return 0, 1
        if self.name in ABSMAXS:
            return first // block_size, -(-last // block_size)
        return first, last


def fields_of(layout: Layout, param: Tensor, entry: Mapping[str, Any]) -> tuple[Field, ...]:
    """Returns the fields of a parameter's state, in the memory order of what exists of it."""
    fields, first = [], 0
    for name in layout.names:
        tensor = entry.get(name)
        if not isinstance(tensor, Tensor) or not is_dense(tensor):
            tensor = _new_on_meta(layout.slot(name), param)
        size = tensor.numel() * tensor.element_size()
        fields.append(Field(name, first, size, tensor.shape, tensor.stride(), tensor.dtype))
        first = aligned(first + size)
    return tuple(fields)


def _new_on_meta(slot: Slot, param: Tensor) -> Tensor:
    """Returns what a parameter has before its first step, without memory that a plan would
    count."""
    form = {"dtype": param.dtype, "device": "meta"}
    with _disable_current_modes():
        return slot.new(torch.empty_strided(param.shape, param.stride(), **form))


def size_of(fields: tuple[Field, ...]) -> int:
    """Returns the bytes of a run that has these fields."""
    return aligned(fields[-1].first + fields[-1].size)


def flat(tensor: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in their order in memory. It counts writes with it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_cuttable(
    layout: Layout, param: Tensor, group: dict[str, Any], fields: tuple[Field, ...]
) -> bool:
    """Returns whether a part of a parameter is stepped as the whole is: its elements lie in memory
    as those of its state, and no random numbers depend on their places."""
    if layout.weights.is_random or group.get("code_rounding") == "stochastic":
        return False
    return is_dense(param) and all(
        field.stride == param.stride() for field in fields if field.name in layout.param_like
    )


class Home:
    """The place of a parameter's state in an arena."""

    def __init__(self, slab: Tensor, first: int, fields: tuple[Field, ...], engine: Engine) -> None:
        self.slab, self.first, self.fields, self._engine = slab, first, fields, engine
        self.size = size_of(fields)
        self.views = {one.name: one.of(slab.view(one.dtype), first) for one in fields}
        self.written: Ticket = None  # of the last copy to it

    def wait(self) -> None:
        """Waits until the copies to it have ended: what is there may be read then, or freed."""
        if self.written is not None:
            self._engine.sync(self.written)
            self.written = None

    def holds(self, entry: Mapping[str, Any] | None, names: tuple[str, ...]) -> bool:
        """Returns whether a state of these names consists of the tensors here."""
        return (
            entry is not None
            and tuple(self.views) == names
            and all(entry.get(name) is view for name, view in self.views.items())
        )

    def fill(self, layout: Layout, param: Tensor, entry: dict[str, Any]) -> None:
        """Copies a state here, makes what it lacks, and puts the tensors here in its place. Copies
        to this place must have ended."""
        for name, view in self.views.items():
            value, slot = entry.get(name), layout.slot(name)
            if value is view:
                continue
            if isinstance(value, Tensor):
                view.copy_(value)
            elif slot.first is None:
                view.zero_()
            elif slot.shape is None and param.stride() == view.stride() and is_dense(param):
                # By parts, because a device has no room for a float32 copy of a large parameter.
                for source, target in zip(flat(param).split(PART), flat(view).split(PART)):
                    target.copy_(slot.first(source))
            else:
                view.copy_(slot.first(param))
        entry.update(self.views)
