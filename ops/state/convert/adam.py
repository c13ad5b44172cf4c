"""Reads and writes states of torch, Headroom, torchao, apex and DeepSpeed: torch's keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...functional.dynamic_map import dynamic_map
from ...optim.adam8bit import Adam8bit
from ...optim.muon.matrices import keeps_blocks
from ...param_states.block_scales import absmax_of, zero_absmaxs
from .codes import Codes, check_map, codes_of, floats_of
from .neutral import BESIDE, MOMENTS, RULES, SQUARES, Context, Library, State, cast, step64

TORCH_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
OUR_OPTIONS = (
    "decoupled_weight_decay",
    "state_dtype",
    "max_grad_norm",
    "master",
    "rounding",
    "seed",
    "use_muon",
    "split",
    "transposed",
    "variant",
    "ns_dtype",
    "normuon",
)


def _read(entry: dict[str, Any], context: Context) -> State:
    """Reads a state of any of them. The step of apex is in the group; torch's SGD counts none, and
    has a moment from its first step on."""
    moments: dict[str, Tensor | Codes] = {}
    for name in MOMENTS:
        value = entry.get(name)
        if value is None:
            continue
        is_signed = name not in SQUARES
        if f"{name}_absmax" in entry:
            absmax = entry[f"{name}_absmax"].flatten()
            size = context.group.get("block_size", 256)
            moments[name] = Codes(value, absmax, size, is_signed)
        elif hasattr(value, "codes"):
            if type(value).__name__ != "OptimState8bit":
                raise ValueError(f"has an {type(value).__name__}, which is not of 8 bits")
            size = value.codes.numel() // max(1, value.scale.numel())
            check_map(value.qmap, is_signed)
            moments[name] = Codes(value.codes, value.scale, size, is_signed)
        else:
            moments[name] = value
    step = entry.get("step", context.group.get("step"))
    if step is None and context.rule != "adam":
        step = float(bool(moments))
    return State(step, moments, {name: entry[name] for name in BESIDE if name in entry})


def _write_torch(state: State, context: Context) -> dict[str, Any]:
    moments = {name: cast(floats_of(moment), context) for name, moment in state.moments.items()}
    return {"step": torch.tensor(float(state.step)), **moments}


def _write_apex(state: State, context: Context) -> dict[str, Any]:
    entry = _write_torch(state, context)
    return {name: entry[name] for name in RULES["adam"]}


def _write_deepspeed(state: State, context: Context) -> dict[str, Any]:
    return {"step": int(state.step), **_write_apex(state, context)}


def _write_torchao_8bit(state: State, context: Context) -> dict[str, Any]:
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ImportError("to='torchao-8bit' needs the package torchao") from error
    entry = _write_torch(State(state.step, {}), context)
    for name, moment in state.moments.items():
        is_signed, size = name == "exp_avg", context.block_size
        if not context.is_8bit(moment) or math.prod(moment.shape) % size:
            entry[name] = cast(floats_of(moment), context)
            continue
        codes = codes_of(moment, size, is_signed)
        values = dynamic_map(is_signed).to(codes.codes.device)
        entry[name] = OptimState8bit(
            codes.codes, codes.absmax, values, is_signed, context.dtype or torch.float32
        )
    return entry


def _write_headroom(state: State, context: Context) -> dict[str, Any]:
    moments = {name: floats_of(moment) for name, moment in state.moments.items()}
    return {"step": step64(state), **moments, **state.beside}


def _write_headroom_8bit(state: State, context: Context) -> dict[str, Any]:
    # With amsgrad, which has no 8-bit form, the moments stay in float32.
    large = [context.is_8bit(moment) for moment in state.moments.values()]
    if context.rule == "muon":  # whose parts that do not begin at a block have none
        large += [_keeps_blocks(moment, context) for moment in state.moments.values()]
    if "max_exp_avg_sq" in state.moments or not all(large):
        return _write_headroom(state, context)
    entry: dict[str, Any] = {"step": step64(state)}
    for name, moment in state.moments.items():
        in_rows = context.rule == "muon" and len(moment.shape) < 4
        codes = codes_of(moment, context.block_size, name not in SQUARES, any_order=not in_rows)
        entry[name] = codes.codes
        shape = zero_absmaxs(codes.codes, context.block_size).shape
        entry[absmax_of(name)] = codes.absmax.view(shape)
    return entry | state.beside


def _keeps_blocks(moment: Tensor | Codes, context: Context) -> bool:
    like = torch.empty(moment.shape, device="meta")
    return keeps_blocks(like, context.group.get("split"), context.block_size)


LIBRARIES = {
    "headroom": Library(_read, _write_headroom, TORCH_OPTIONS, OUR_OPTIONS, (*RULES,)),
    "headroom-8bit": Library(
        _read,
        _write_headroom_8bit,
        TORCH_OPTIONS,
        (*OUR_OPTIONS, *Adam8bit._own_options),
        (*RULES,),
    ),
    "torch": Library(
        _read,
        _write_torch,
        TORCH_OPTIONS,
        ("decoupled_weight_decay",),
        ("adam", "sgd", "muon"),
        casts=True,
    ),
    "torchao-8bit": Library(_read, _write_torchao_8bit, {"amsgrad": False}, casts=True),
    "apex": Library(_read, _write_apex, {"bias_correction": True}, ("step",), casts=True),
    "deepspeed": Library(
        _read, _write_deepspeed, {"bias_correction": True, "amsgrad": False}, casts=True
    ),
}
