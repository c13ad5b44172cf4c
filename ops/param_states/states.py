"""Declares the state of a parameter. Its creation, the checks of a loaded one, the memory report
and the order of an op's arguments follow from the declaration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.capture import refuse_in_capture
from .._core.names import name_of
from .._core.registration import FLOATS
from .._core.weight_modes import NEAREST, WeightsMode, mode_of


class Slot(NamedTuple):
    """Declares a tensor in the state of a parameter."""

    name: str
    shape: Callable[[Tensor], Sequence[int]] | None = None  # of a parameter; None: its own
    dtype: torch.dtype | None = None  # None: the parameter's
    loads: tuple[torch.dtype, ...] | None = None  # dtypes that may be loaded; None: ``dtype`` only
    first: Callable[[Tensor], Tensor] | None = None  # its value before step 1; None: zeros

    def new(self, param: Tensor) -> Tensor:
        """Returns the tensor that a parameter has before its first step."""
        if self.first is not None:
            return self.first(param)
        dtype = self.dtype or param.dtype
        if self.shape is None:
            return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        return torch.zeros(self.shape(param), dtype=dtype, device=param.device)

    def shape_for(self, param: Tensor) -> torch.Size:
        return param.shape if self.shape is None else torch.Size(self.shape(param))

    def dtypes_for(self, param: Tensor) -> tuple[torch.dtype, ...]:
        """Returns the dtypes that a loaded tensor may have."""
        return self.loads or (self.dtype or param.dtype,)


def _scalar_shape(param: Tensor) -> tuple[int, ...]:
    return ()


def _float32_copy(param: Tensor) -> Tensor:
    return param.detach().to(torch.float32, copy=True)


STEP = Slot("step", _scalar_shape, torch.float64)  # counts past 2^24


class Layout(NamedTuple):
    """Declares the tensors in the state of each parameter that one op takes."""

    slots: tuple[Slot, ...]
    weights: WeightsMode = NEAREST  # how the parameters are stored
    index: int = 0  # among the optimizer's layouts
    is_whole: bool = False  # whether the op takes whole parameters, as lists of tensors

    @property
    def param_like(self) -> tuple[str, ...]:
        """Returns the names of the tensors that have the parameter's shape."""
        return tuple(slot.name for slot in self.slots if slot.shape is None)

    @property
    def extra(self) -> tuple[str, ...]:
        """Returns the names of the tensors with other shapes."""
        return tuple(slot.name for slot in self.slots if slot.shape is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names, in the order in which the op takes them."""
        return (*self.param_like, *self.extra)

    def slot(self, name: str) -> Slot:
        """Returns the declaration of a tensor. A tensor that is not declared has the parameter's
        shape and dtype."""
        return next((slot for slot in self.slots if slot.name == name), Slot(name))

    def with_weights(self, mode: WeightsMode) -> Layout:
        """Returns the layout of 16-bit parameters that are stored in this mode."""
        slots = self.slots
        if mode.residual:
            first = _float32_copy if mode.residual == "master" else None
            slots = (*slots, Slot(mode.residual, dtype=mode.dtype, first=first))
        return self._replace(slots=slots, weights=mode)


class StatefulOptimizer(torch.optim.Optimizer):
    """Declares the state of its parameters. A subclass defines :meth:`layouts`
    and, if there are several, the three methods that choose one."""

    def _layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        """Returns the layouts that states in a group may have, without the residuals of weights."""
        raise NotImplementedError

    def _layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        """Returns the position in ``layouts`` of this parameter's state."""
        return 0

    def _layout_indices(self, params: list[Tensor], group: dict[str, Any]) -> list[int]:
        """Returns what ``_layout_index`` does, for many parameters."""
        return [self._layout_index(param, group) for param in params]

    def _layout_index_of_state(self, entry: dict[str, Any]) -> int:
        """Returns what ``_layout_index`` does, for an existing state."""
        return 0

    def _every_layout(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        """Returns ``layouts`` and, if the group has a mode for 16-bit weights, the layouts with
        that mode."""
        layouts = tuple(one._replace(index=i) for i, one in enumerate(self._layouts(group)))
        mode = mode_of(group)
        if mode is NEAREST:
            return layouts
        return *layouts, *(layout.with_weights(mode) for layout in layouts)

    def _weights_mode(self, param: Tensor, group: dict[str, Any]) -> WeightsMode:
        mode = mode_of(group)
        return mode if param.dtype in mode.params else NEAREST

    def _layout(self, param: Tensor, group: dict[str, Any], index: int | None = None) -> Layout:
        """Returns the layout of a parameter's state."""
        index = self._layout_index(param, group) if index is None else index
        layout, mode = self._layouts(group)[index], self._weights_mode(param, group)
        return (layout if mode is NEAREST else layout.with_weights(mode))._replace(index=index)

    def _entry(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a parameter, after it has made missing tensors."""
        layout = self._layout(param, group)
        if not self.state.get(param) and dtype_refusal(param, "", "") is not None:
            name = name_of(self.param_groups, param)
            raise RuntimeError(dtype_refusal(param, type(self).__name__, name))
        missing = [name for name in layout.names if name not in self.state.get(param, ())]
        if missing:
            refuse_in_capture(f"{', '.join(missing)} of {name_of(self.param_groups, param)}")
        new = {name: layout.slot(name).new(param) for name in missing}  # all, or none
        entry = self.state[param]
        entry.update(new)
        return entry

    def _state_device(self, param: Tensor) -> torch.device:
        """Returns where the state of a parameter lies."""
        return param.device

    def _check_params(self, params: Any) -> None:
        params = [params] if isinstance(params, Tensor) else params
        for i, param in enumerate(params if isinstance(params, list) else ()):
            name = f"parameter {i} of its group"
            if isinstance(param, tuple) and len(param) == 2:
                name, param = f"parameter '{param[0]}'", param[1]
            # Tensors that take no gradient, such as quantized weights, may come along.
            if isinstance(param, Tensor) and param.requires_grad:
                if (words := dtype_refusal(param, type(self).__name__, name)) is not None:
                    raise ValueError(words)


def dtype_refusal(param: Tensor, kind: str, name: str) -> str | None:
    """Returns why an optimizer of class ``kind`` cannot step the dtype of a parameter, or None."""
    if param.is_complex():
        return (
            f"{kind} does not support complex parameters, but {name} is complex; optimize "
            "torch.view_as_real of it"
        )
    if param.dtype in FLOATS:
        return None
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
    return (
        f"{kind} takes parameters in {dtypes}, but {name} is in {param.dtype}; convert it, for "
        "instance with model.float(), or give it to an optimizer of torch.optim"
    )
