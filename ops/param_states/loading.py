"""Carries the state of an optimizer through ``state_dict()``, loading, copies and pickles.

torch's loader would cast every state to the dtype of its parameter. Here a state keeps the dtype in
which it was saved, and values that training never makes are refused before anything changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._core.dtensor import from_shard, local_part
from .._core.names import param_names
from .._core.overlap import is_dense, is_freed
from .._core.ownership import Ownership
from .._core.registration import FLOATS
from .._core.weight_modes import RESIDUALS
from .states import Layout, Slot, StatefulOptimizer

STATE_DTYPES = {str(dtype): dtype for dtype in FLOATS}
COPIED = (  # attributes that copies and pickles have, beyond torch's
    "_skips",
    "_stalled",
    "check_finite",
    "clip_coef",
    "found_inf",
    "grad_norm",
    "grad_scale",
    "max_consecutive_skips",
    "_measured",
    "_measured_params",
    "_paging",
)
SIGNED = (
    "exp_avg",
    "momentum_buffer",
    *RESIDUALS,
)  # all other states are means of squares, or magnitudes
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # which Adam's op takes in one dtype


class Uncast:
    """Carries a state through torch's loader, which would cast a bare tensor to the dtype of its
    parameter (``Optimizer._process_value_according_to_param_policy``)."""

    def __init__(self, value: Any) -> None:
        self.value = value


def keep_states(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    """Checks the form before loading, and wraps every state in a :class:`Uncast`."""
    _check_form(loaded)
    entries = {
        key: {name: Uncast(value) for name, value in entry.items()}
        if isinstance(entry, dict)
        else Uncast(entry)
        for key, entry in loaded["state"].items()
    }
    return loaded | {"state": entries}


def _check_form(loaded: dict[str, Any]) -> None:
    for key, kind in (("state", dict), ("param_groups", list)):
        if key not in loaded:
            raise KeyError(f"the loaded state dict has no '{key}'")
        if not isinstance(loaded[key], kind):
            what = type(loaded[key]).__name__
            raise TypeError(f"'{key}' of the loaded state dict is a {what}, not a {kind.__name__}")
    for index, group in enumerate(loaded["param_groups"]):
        place = f"param_groups[{index}] of the loaded state dict"
        if not isinstance(group, dict):
            raise TypeError(f"{place} is a {type(group).__name__}, not a dict")
        if not isinstance(group.get("params"), (list, tuple)):
            raise TypeError(f"{place} has no list 'params'")
        if odd := [key for key in group if not isinstance(key, str)]:
            raise TypeError(f"{place} has an option named {odd[0]!r}, wanted a string")
        for key, value in group.items():
            if isinstance(value, Tensor):
                _check_memory(key, value, place)


def export_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replaces dtypes by their names, and remainders that are DTensors by bfloat16 numbers."""
    for group in state_dict["param_groups"]:
        if isinstance(group.get("state_dtype"), torch.dtype):
            group["state_dtype"] = str(group["state_dtype"])
    for key, entry in state_dict["state"].items():
        remainder = entry.get("remainder") if isinstance(entry, dict) else None
        if isinstance(remainder, DTensor) and remainder.dtype == torch.int16:
            viewed = _viewed(remainder, torch.bfloat16)
            state_dict["state"][key] = entry | {"remainder": viewed}
    return state_dict


def complete_groups(groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Adds the options that groups of torch's optimizers lack, and replaces names of dtypes by
    dtypes."""
    for group in groups:
        for key in ("state_dtype", "master", "rounding", "seed", "max_grad_norm"):
            if key in defaults:
                group.setdefault(key, defaults[key])
        if isinstance(named := group.get("state_dtype"), str):
            if named not in STATE_DTYPES:
                raise ValueError(f"state_dtype must be one of {FLOATS}, got {named!r}")
            group["state_dtype"] = STATE_DTYPES[named]


def restored_states(
    optimizer: StatefulOptimizer, state: dict[str, Any]
) -> defaultdict[Any, dict[str, Any]]:
    """Returns the states in the argument of ``__setstate__``. States that are loaded, rather than
    copied or unpickled, are checked first."""
    restored: defaultdict[Any, Any] = defaultdict(dict)
    groups = {id(p): group for group in state["param_groups"] for p in group["params"]}
    names: dict[Tensor, str] | None = None
    for param, entry in state["state"].items():
        if isinstance(entry, Uncast):
            entry = entry.value
        if not isinstance(entry, dict):  # not of a parameter: other code may keep things there
            if id(param) in groups:
                name = param_names(optimizer.param_groups).get(param, "a parameter")
                raise ValueError(
                    f"the loaded state of {name} is of type {type(entry).__name__}, wanted a dict"
                )
            restored[param] = entry
            continue
        values = {k: v.value if isinstance(v, Uncast) else v for k, v in entry.items()}
        loading = any(isinstance(value, Uncast) for value in entry.values())
        if loading and id(param) in groups:
            names = param_names(optimizer.param_groups) if names is None else names
            group = groups[id(param)]
            for key, value in values.items():  # which are read from here on
                if isinstance(value, Tensor):
                    on_meta = local_part(param).is_meta
                    _check_memory(key, value, names[param], may_be_on_meta=on_meta)
            values = optimizer._translated(param, values, group)
            values = _restored(optimizer, param, values, group, names[param])
        restored[param] = values
    return restored


def own_states(
    states: dict[Any, Any], loaded: dict[Any, Any], before: dict[Any, dict[str, Any]]
) -> None:
    """Copies the tensors of loaded states that have memory of the state dict. Each takes the place
    of one of the states ``before``, which is dropped then: a load takes the memory of one tensor
    more. What the optimizer had already it keeps."""
    given = [value.value for entry in loaded.values() for value in _uncast(entry)]
    ownership = Ownership(given, before)
    for param, entry in states.items():
        if not isinstance(entry, dict):
            states[param] = ownership.owned(entry)
            continue
        replaced = before.get(param, {})
        for name, value in entry.items():
            entry[name] = ownership.owned(value)
            replaced.pop(name, None)


def _uncast(entry: Any) -> list[Uncast]:
    values = entry.values() if isinstance(entry, dict) else [entry]
    return [value for value in values if isinstance(value, Uncast)]


def _restored(
    optimizer: StatefulOptimizer,
    param: Tensor,
    entry: dict[str, Any],
    group: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """Returns a loaded state on the device and in the memory order of its parameter, or raises."""
    layout = optimizer._layout(param, group, optimizer._layout_index_of_state(entry))
    unknown = [key for key in RESIDUALS if key in entry and key not in layout.names]
    if unknown:
        raise ValueError(
            f"the loaded state of {name} has a '{unknown[0]}', which belongs to weights that "
            f"were stored in another mode than these, in {param.dtype} with "
            f"master={group.get('master')!r}; carry weights over with master_weights() and "
            "load_master_weights()"
        )
    restored = dict(entry)
    device = optimizer._state_device(param)
    for key in layout.names:
        if key in entry:
            restored[key] = _checked(entry[key], layout, layout.slot(key), param, name, device)
        elif key not in RESIDUALS:  # a state without one leaves the weights as they are
            raise ValueError(f"the loaded state of {name} has no '{key}'; it has {sorted(entry)}")
    for key in entry.keys() - {*layout.names}:  # which other options may bring back
        if key == "step":
            restored[key] = _counter(entry[key], device, name)
        elif isinstance(entry[key], Tensor):
            restored[key] = entry[key].detach().to(param.device)
    moments = {restored[key].dtype for key in MOMENTS if key in layout.names}
    if len(moments - {torch.uint8}) > 1:
        raise ValueError(
            f"the loaded moments of {name} have several dtypes: {', '.join(map(str, moments))}"
        )
    return restored


def _checked(
    value: Any, layout: Layout, slot: Slot, param: Tensor, name: str, device: torch.device
) -> Tensor:
    key = slot.name
    if key == "step":
        return _counter(value, device, name)
    shape, dtypes = slot.shape_for(param), slot.dtypes_for(param)
    if not isinstance(value, Tensor) or value.shape != shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        hint = ""
        if key.endswith("absmax") and max(len(shape), getattr(value, "ndim", 0)) > 2:
            hint = (
                "; these 8-bit blocks are local to shards: headroom.state.load_sharded() "
                "loads what another number of ranks saved"
            )
        raise ValueError(
            f"the loaded '{key}' of {name} is {got}, wanted a tensor of shape {tuple(shape)}{hint}"
        )
    if isinstance(value, DTensor) != isinstance(param, DTensor):
        raise ValueError(
            f"the loaded '{key}' of {name} is a {type(value).__name__}, but the parameter "
            f"is a {type(param).__name__}; load sharded states with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if key == "remainder" and value.dtype == torch.bfloat16:  # see export_state()
        value = _viewed(value, layout.weights.dtype)
    if value.dtype not in dtypes:
        raise ValueError(
            f"the loaded '{key}' of {name} has dtype {value.dtype}, wanted one of {dtypes}"
        )
    if key not in SIGNED and value.dtype != torch.uint8:
        _check_values(key, value, name)
    value = value.detach().to(device)
    if not isinstance(value, DTensor) and not is_dense(value):
        value = value.contiguous()  # elements that share memory cannot be stepped
    # Codes stay in the order in which their scales were made.
    return _ordered(value, param) if slot.shape is None and value.dtype != torch.uint8 else value


def _counter(value: Any, device: torch.device, name: str) -> Tensor:
    if not isinstance(value, (Tensor, Real)):
        raise ValueError(f"the loaded 'step' of {name} is of type {type(value).__name__}")
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(
                f"the loaded 'step' of {name} has {value.numel()} elements of {value.dtype}, "
                "wanted 1 number"
            )
    count = torch.as_tensor(value).detach().reshape(()).to(torch.float64)
    if not count.is_meta and not 0 <= count.item() < 2**53:
        raise ValueError(f"the loaded 'step' of {name} is {count.item()}, wanted 0 or more")
    return count.to(device)


def _check_memory(key: str, value: Tensor, name: str, may_be_on_meta: bool = False) -> None:
    """Refuses tensors without elements to read: sparse ones, those on the meta device, and those
    whose storage was freed."""
    local = local_part(value)
    if local.layout != torch.strided or (local.is_meta and not may_be_on_meta):
        what = "on the meta device" if local.is_meta else f"of layout {local.layout}"
        raise ValueError(f"the loaded '{key}' of {name} is {what}, wanted a dense tensor")
    if not local.is_meta and is_freed(local):
        raise ValueError(f"the loaded '{key}' of {name} has no memory: its storage was freed")


def _check_values(key: str, value: Tensor, name: str) -> None:
    """Refuses values that would make the weights NaN: the step takes their square roots and
    products."""
    local = local_part(value).detach()
    if local.is_meta or not local.numel():
        return
    finite = key.endswith("absmax")  # an infinite one makes zeros NaN
    # One pass without a temporary tensor answers for all states but those with NaNs.
    lowest, highest = local.aminmax()
    if lowest >= 0 and (not finite or highest < math.inf):
        return
    bad, wanted = local < 0, "0 or more"
    if finite:
        bad, wanted = bad | ~local.isfinite(), "0 or more, and finite"
    if bad.any():
        raise ValueError(
            f"the loaded '{key}' of {name} has {int(bad.sum()):,} elements such as "
            f"{local[bad][0].item():g}, wanted {wanted}"
        )


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bits of a tensor as numbers of another dtype of the same size."""
    if not isinstance(tensor, DTensor):
        return tensor.view(dtype)
    local, form = tensor.to_local().view(dtype), {"shape": tensor.shape, "stride": tensor.stride()}
    return from_shard(local, tensor.device_mesh, tensor.placements, **form)


def _ordered(value: Tensor, param: Tensor) -> Tensor:
    """Returns a state in the memory order of its parameter."""
    if isinstance(value, DTensor) or value.stride() == param.stride():
        return value
    kept = {"dtype": value.dtype, "device": value.device}
    ordered = torch.empty_like(param, **kept, memory_format=torch.preserve_format)
    return ordered.copy_(value)
