"""Says where the state of a parameter lies in a run of bytes: in an arena, or in a slot of a
ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..._core.dtensor import local_part, on_meta, spec_of, with_spec
from ..._core.overlap import flat, is_dense
from ...host.engine import Engine
from ...host.ring import Place, aligned
from ..block_scales import ABSMAXS, unpadded
from ..states import STEP, Layout, Slot

PART = 1 << 20  # elements


class Field(NamedTuple):
    """A tensor of the state of a parameter, or its shard on this rank."""

    name: str
    first: int  # byte in the run
    size: int  # in bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: Any = None  # of the DTensor that it is a shard of

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
        if not isinstance(tensor, Tensor) or not is_dense(local_part(tensor)):
            tensor = _new_on_meta(layout.slot(name), param)
        local, spec = local_part(tensor), spec_of(tensor)
        size = local.numel() * local.element_size()
        fields.append(Field(name, first, size, local.shape, local.stride(), local.dtype, spec))
        first = aligned(first + size)
    return tuple(fields)


def _new_on_meta(slot: Slot, param: Tensor) -> Tensor:
    """Returns what a parameter has before its first step, without memory that a plan would
    count."""
    with _disable_current_modes():
        return slot.new(on_meta(param))


def size_of(fields: tuple[Field, ...]) -> int:
    """Returns the bytes of a run that has these fields."""
    return aligned(fields[-1].first + fields[-1].size) if fields else 0


def is_cuttable(
    layout: Layout, param: Tensor, group: dict[str, Any], fields: tuple[Field, ...]
) -> bool:
    """Returns whether a part of a parameter is stepped as the whole is: its elements lie in memory
    as those of its state, its op takes parts, and no random numbers depend on their places."""
    if layout.is_whole or layout.weights.is_random or group.get("code_rounding") == "stochastic":
        return False
    param, alike = local_part(param), layout.param_like
    return is_dense(param) and all(
        field.stride == param.stride() for field in fields if field.name in alike
    )


def taken_by_ops(state: Mapping[str, Tensor], param: Tensor, block_size: int) -> dict[str, Tensor]:
    """Returns the tensors of a state, or their shards on this rank, as ops take them for the
    shard of the parameter: without the scales of blocks that only a larger shard has."""
    found = {name: local_part(value) for name, value in state.items()}
    for name in found.keys() & {*ABSMAXS}:
        (found[name],) = unpadded([found[name]], [param], block_size)
    return found


class Home(Place):
    """The place of a parameter's state in an arena."""

    def __init__(self, slab: Tensor, first: int, fields: tuple[Field, ...], engine: Engine) -> None:
        super().__init__(slab, first, size_of(fields), engine)
        self.fields = fields
        self.views = {
            one.name: with_spec(one.of(slab.view(one.dtype), first), one.spec) for one in fields
        }
        self._is_new = True  # and zero

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
        local = local_part(param)
        for name, whole in self.views.items():
            value, slot, view = entry.get(name), layout.slot(name), local_part(whole)
            if value is whole:
                continue
            if isinstance(value, Tensor):
                view.copy_(local_part(value))
            elif slot.first is None:
                if not self._is_new:
                    view.zero_()
            elif slot.shape is None and local.stride() == view.stride() and is_dense(local):
                # By parts, because a device has no room for a float32 copy of a large parameter.
                for source, target in zip(flat(local).split(PART), flat(view).split(PART)):
                    target.copy_(slot.first(source))
            else:
                view.copy_(local_part(slot.first(param)))
        entry.update(self.views)
        self._is_new = False
