"""Writes states of Headroom's Adam and AdamW, and of their 8-bit forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim.adam8bit import OPTIONS
from ...optim.block_scales import ABSMAXS, zero_absmaxs
from .adam import TORCH_OPTIONS, read_adam
from .codes import codes_of, floats_of
from .neutral import MOMENTS, Context, Library, State, step64

__all__ = ["LIBRARIES"]

OUR_OPTIONS = (
    "decoupled_weight_decay",
    "state_dtype",
    "max_grad_norm",
    "master",
    "rounding",
    "seed",
)


def _write_headroom(state: State, context: Context) -> dict[str, Any]:
    moments = {name: floats_of(moment) for name, moment in state.moments.items()}
    return {"step": step64(state), **moments, **our_residual(state)}


def _write_headroom_8bit(state: State, context: Context) -> dict[str, Any]:
    # With amsgrad, which has no 8-bit form, the moments stay in float32.
    if "max_exp_avg_sq" in state.moments or not context.is_8bit(state.moments["exp_avg"]):
        return _write_headroom(state, context)
    entry: dict[str, Any] = {"step": step64(state)}
    for name, absmax in zip(MOMENTS, ABSMAXS):
        codes = codes_of(state.moments[name], context.block_size, name == "exp_avg", any_order=True)
        entry[name] = codes.codes
        shape = zero_absmaxs(codes.codes, context.block_size).shape
        entry[absmax] = codes.absmax.view(shape)
    return entry | our_residual(state)


def our_residual(state: State) -> dict[str, Tensor]:
    if "error_bits" not in state.residual:
        return state.residual
    return {} if state.weights is None else {"master": state.weights}


LIBRARIES = {
    "headroom": Library(read_adam, _write_headroom, TORCH_OPTIONS, OUR_OPTIONS),
    "headroom-8bit": Library(
        read_adam, _write_headroom_8bit, TORCH_OPTIONS, (*OUR_OPTIONS, *OPTIONS)
    ),
}
