"""What optimizers with moments of one byte share: which parameters have them, and their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.checks import check_number
from .._core.names import name_of
from .._core.overlap import is_dense
from ..functional.adamw8bit import BLOCK_SIZES
from ..param_states.block_scales import absmax_of, unpadded, zero_absmaxs
from ..param_states.states import STEP, Layout, Slot
from .base import Optimizer

Nonfinite = Literal["skip_step", "skip_element", "propagate"]
EIGHT_BIT = 1  # among an optimizer's layouts; the other has float32 moments


class EightBit(Optimizer):
    """Makes the moments of an optimizer codes with scales; comes before that optimizer among the
    bases."""

    _code_names: tuple[str, ...] = ()  # of the moments, the one that tells first
    _own_options: tuple[str, ...] = ("optim_bits", "min_8bit_size", "block_size", "nonfinite")
    _choices: dict[str, tuple[Any, ...]] = {  # the values that options may have
        "block_size": BLOCK_SIZES,
        "nonfinite": get_args(Nonfinite),
    }
    _scale_names: tuple[str, ...] = ()  # of their scales
    _overrides: dict[Tensor, int]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._scale_names = tuple(map(absmax_of, cls._code_names))

    def _codes_in(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the names of the moments that parameters of a group have, which may be codes."""
        return self._code_names

    def override(self, target: Tensor | nn.Module, name: str | None = None, *, bits: int) -> None:
        """Chooses 8-bit or float32 moments for a parameter of any size, before its first step. The
        target is a tensor, a module and the name of a parameter in it, or a module with all its
        parameters.

        Raises:
            ValueError: ``bits`` is neither 8 nor 32, the optimizer does not have the parameter, or
                the parameter has a state already.
        """
        if bits not in (8, 32):
            raise ValueError(f"bits must be 8 or 32, got {bits}")
        if isinstance(target, nn.Module):
            chosen = [target.get_parameter(name)] if name else list(target.parameters())
        else:
            chosen = [target]
        mine = {param for group in self.param_groups for param in group["params"]}
        for param in chosen:
            if param not in mine:
                raise ValueError("override() got a parameter that this optimizer does not have")
            if self.state.get(param):
                raise ValueError(
                    f"{name_of(self.param_groups, param)} has a state already; call override() "
                    "before its first step"
                )
        self._overrides.update(dict.fromkeys(chosen, bits))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_overrides": self._overrides}

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:
            for key in self._own_options:
                group.setdefault(key, defaults[key])
            group["nonfinite"] = defaults["nonfinite"]  # which is the same in all groups
        super().__setstate__(state)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options["optim_bits"] not in (8, 32):
            raise ValueError(f"optim_bits must be 8 or 32, got {options['optim_bits']}")
        check_number("min_8bit_size", options["min_8bit_size"])
        if not options["min_8bit_size"] >= 0:
            raise ValueError(f"min_8bit_size must be >= 0, got {options['min_8bit_size']}")
        for name, allowed in self._choices.items():
            value = options[name]
            if type(value) is not type(allowed[0]) or value not in allowed:
                kind = ", as an int" if isinstance(allowed[0], int) else ""
                raise ValueError(f"{name} must be one of {allowed}{kind}, got {value!r}")
        if options["nonfinite"] != getattr(self, "defaults", options)["nonfinite"]:
            raise ValueError("nonfinite holds for all groups: give it to the constructor")

    @property
    def _skips_nonfinite(self) -> bool:
        return self.defaults["nonfinite"] == "skip_step"

    def _layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        in_float32 = Layout(
            tuple(
                slot if slot is STEP else slot._replace(dtype=torch.float32)
                for slot in super()._layouts(group)[0].slots
            )
        )
        names = self._codes_in(group)
        codes = (Slot(name, dtype=torch.uint8) for name in names)
        zeros = partial(zero_absmaxs, block_size=group["block_size"])
        absmaxs = (
            Slot(scale, lambda param: zeros(param).shape, torch.float32, first=zeros)
            for name, scale in zip(self._code_names, self._scale_names)
            if name in names
        )
        return in_float32, Layout((*codes, *absmaxs, STEP))

    def _layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        entry = self.state.get(param)
        if entry and self._codes_in(group)[0] in entry:
            return self._layout_index_of_state(entry)
        if param in self._overrides:
            return int(self._overrides[param] == 8)
        return int(group["optim_bits"] == 8 and param.numel() >= group["min_8bit_size"])

    def _layout_indices(self, params: list[Tensor], group: dict[str, Any]) -> list[int]:
        # Most have a state. Every step asks for thousands of small parameters.
        name = self._codes_in(group)[0]
        return [
            int(entry[name].dtype is torch.uint8)
            if entry and name in entry
            else self._layout_index(param, group)
            for param, entry in zip(params, map(self.state.get, params))
        ]

    def _layout_index_of_state(self, entry: dict[str, Any]) -> int:
        moments = map(entry.get, self._code_names)
        return int(any(getattr(one, "dtype", None) == torch.uint8 for one in moments))

    def _translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        entry = dict(super()._translated(param, entry, group))
        for name in self._scale_names:
            scales = entry.get(name)
            if not isinstance(scales, Tensor) or isinstance(scales, DTensor):
                continue
            if scales.layout == torch.strided:  # others are refused later
                shape = zero_absmaxs(param, group["block_size"]).shape
                if scales.shape == (shape.numel(),):  # bitsandbytes has no rows
                    scales = scales.reshape(shape)
                entry[name] = scales.contiguous()
        return entry

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        skip_nonfinite = self.defaults["nonfinite"] == "skip_element"
        return super()._options(group) | {"skip_nonfinite": skip_nonfinite}


def in_code_order(
    columns: list[list[Tensor]], codes: int, scales: list[list[Tensor]], block_size: int
) -> tuple[list[list[Tensor]], list[list[Tensor]], Callable[[], None]]:
    """Returns the lists of a call and the scales of their blocks as the op takes them, and what to
    call after it.

    The op's blocks follow the memory order of a parameter, and those of a state the order in which
    its codes were made. Where a parameter has moved since, it is copied.

    Args:
        columns: lists of tensors of the same shapes, the parameters first.
        codes: the place of the codes among them.
        scales: the scales of the parameters' blocks, of which the largest shard may have more.
        block_size: elements per scale.
    """
    lists = [list(column) for column in columns]
    views = {}
    for k, tensors in enumerate(zip(*lists)):
        if _is_moved(tensors[0], tensors[codes], tensors):
            order = sorted(range(tensors[0].dim()), key=tensors[codes].stride, reverse=True)
            for column, tensor in zip(lists, tensors):
                column[k] = tensor.permute(order)
            views[k] = lists[0][k]
            lists[0][k] = views[k].contiguous()
    params = lists[0]

    def put_back() -> None:
        for k, view in views.items():
            view.copy_(params[k])

    return lists, [unpadded(column, params, block_size) for column in scales], put_back


def _is_moved(param: Tensor, codes: Tensor, every: Iterable[Tensor]) -> bool:
    """Returns whether a parameter's memory order is no longer that of its codes."""
    return (
        codes.stride() != param.stride()
        and is_dense(param)
        and all(tensor.shape == param.shape for tensor in every)
    )
