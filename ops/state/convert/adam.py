"""Reads and writes states of torch's Adam and AdamW, whose keys most libraries have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core.weight_modes import HALVES, RESIDUALS
from ...functional.weights import join_weights_
from .codes import Codes, floats_of, other_map
from .neutral import MOMENTS, Context, Library, State, cast

__all__ = ["LIBRARIES", "TORCH_OPTIONS", "read_adam", "write_torch"]

TORCH_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


def read_adam(entry: dict[str, Any], context: Context) -> State:
    """Reads a state with torch's keys: of torch, Headroom, torchao, DeepSpeed, and apex, whose step
    is in the group."""
    moments: dict[str, Tensor | Codes] = {}
    for name in MOMENTS:
        value = entry.get(name)
        if value is None:
            continue
        is_signed = name == "exp_avg"
        if f"{name}_absmax" in entry:
            absmax = entry[f"{name}_absmax"].flatten()
            size = context.group.get("block_size", 256)
            moments[name] = Codes(value, absmax, size, is_signed)
        elif hasattr(value, "codes"):
            if type(value).__name__ != "OptimState8bit":
                raise ValueError(f"has an {type(value).__name__}, which is not of 8 bits")
            size = value.codes.numel() // max(1, value.scale.numel())
            moments[name] = Codes(
                value.codes, value.scale, size, is_signed, other_map(value.qmap, is_signed)
            )
        else:
            moments[name] = value
    step = entry.get("step", context.group.get("step"))
    residual = {name: entry[name] for name in RESIDUALS if name in entry}
    weights = residual.get("master")
    if residual and context.param is not None and context.param.dtype in HALVES:
        weights = torch.empty_like(context.param, dtype=torch.float32)
        mode = {name: context.group[name] for name in ("master", "rounding")}
        join_weights_([weights], [context.param.detach()], list(residual.values()), **mode)
    return State(step, moments, residual, weights)


def write_torch(state: State, context: Context) -> dict[str, Any]:
    moments = {name: cast(floats_of(moment), context) for name, moment in state.moments.items()}
    return {"step": torch.tensor(float(state.step)), **moments}


LIBRARIES = {
    "torch": Library(read_adam, write_torch, TORCH_OPTIONS, ("decoupled_weight_decay",), True),
}
