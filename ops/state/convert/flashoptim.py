"""Reads and writes states of FlashOptim's AdamW: 8-bit or float moments, weights of 24 or 32 bits
(arXiv:2602.23349)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core.weight_modes import HALVES
from .codes import Codes, flattened, floats_of, unflattened
from .neutral import MOMENTS, Context, Library, State, is_byte

__all__ = ["LIBRARIES"]

FLASH_GROUP = 32
FLASH_OPTIONS = ("master_bytewidth", "quantize")


def _read_flashoptim(entry: dict[str, Any], context: Context) -> State:
    moments: dict[str, Tensor | Codes] = {}
    for name in MOMENTS[:2]:
        is_signed = name == "exp_avg"
        if f"{name}::quantized" in entry:
            # A loader may have cast the codes to a float type, which holds them exactly.
            codes = entry[f"{name}::quantized"].to(torch.int8 if is_signed else torch.uint8)
            moments[name] = _decode_flash(codes, entry[f"{name}::scales"], is_signed)
        elif name in entry:
            moments[name] = entry[name]
    error, state = entry.get("error_bits"), State(entry["step"], moments)
    if error is not None:
        if error.dtype in HALVES:  # stored so that a loader leaves it as it is
            is_byte = int(context.group["master_bytewidth"]) == 3
            error = error.to(torch.int8) if is_byte else error.view(torch.int16)
        state.residual = {"error_bits": error}
        if context.param is not None:
            state.weights = _decode_error(error, context.param.detach())
    return state


def _write_flashoptim(state: State, context: Context) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": torch.tensor(int(state.step), dtype=torch.int64)}
    for name in MOMENTS[:2]:
        codes, scales = _encode_flash(
            floats_of(state.moments[name]).contiguous(), name == "exp_avg"
        )
        entry[f"{name}::quantized"] = codes
        is_bf16 = context.dtype == torch.bfloat16
        entry[f"{name}::scales"] = scales.view(torch.bfloat16) if is_bf16 else scales
    return entry | _flash_error(state, context)


def _write_flashoptim_float(state: State, context: Context) -> dict[str, Any]:
    moments = {name: floats_of(state.moments[name]).float() for name in MOMENTS[:2]}
    step = torch.tensor(int(state.step), dtype=torch.int64)
    return {"step": step, **moments, **_flash_error(state, context)}


def _flash_error(state: State, context: Context) -> dict[str, Tensor]:
    error = state.residual.get("error_bits")
    if error is None:
        if state.weights is None or context.with_param(state.weights).param is None:
            return {}
        dtype = torch.int8 if is_byte(state.residual) else torch.int16
        error = _encode_error(state.weights, context.param.detach(), dtype)
    dtype = context.dtype or torch.bfloat16
    return {"error_bits": error.to(dtype) if error.dtype == torch.int8 else error.view(dtype)}


def _decode_flash(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    y = flattened(codes).float() / (127.0 if is_signed else 255.0)
    y = y / (2.0 - y.abs()) if is_signed else y
    if scales.dtype == torch.bfloat16:  # the bits of float16, which a loader would cast
        scales = scales.view(torch.float16)
    x = y * scales.float().repeat_interleave(FLASH_GROUP)[: y.numel()]
    return unflattened(x if is_signed else x * x, codes)


def _encode_flash(moment: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    moment = moment.float()
    x = flattened(moment if is_signed else moment.sqrt())
    rows = torch.nn.functional.pad(x, (0, -x.numel() % FLASH_GROUP)).view(-1, FLASH_GROUP)
    scales = rows.abs().amax(1).clamp(min=1e-12)
    y = rows / scales[:, None]
    y = 127.0 * (2.0 * y / (1.0 + y.abs())) if is_signed else 255.0 * y
    codes = (y + 0.5).floor().flatten()[: x.numel()]
    if not is_signed:  # FlashOptim's own rounding lets small ones become zero
        codes = torch.where((x > 0) & (codes == 0), 1.0, codes)
    codes = codes.to(torch.int8 if is_signed else torch.uint8)
    return unflattened(codes, moment), scales.to(torch.float16)


def _half_ulp(param: Tensor) -> Tensor:
    """Returns half the distance between a 16-bit number and the next one, in float64."""
    mantissa, bias, mask = (7, 127, 0xFF) if param.dtype == torch.bfloat16 else (10, 15, 0x1F)
    exponent = ((param.view(torch.int16).int() >> mantissa) & mask).clamp(min=1)
    one = torch.ones_like(exponent, dtype=torch.float64)
    return torch.ldexp(one, exponent - bias - mantissa - 1)


def _decode_error(error: Tensor, param: Tensor) -> Tensor:
    most = float(torch.iinfo(error.dtype).max)
    return param.float() + ((error.float() / most).double() * _half_ulp(param)).float()


def _encode_error(weights: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    most = float(torch.iinfo(dtype).max)
    share = ((weights - param.float()).double() / _half_ulp(param)).clamp(-1, 1).float() * most
    return ((share.abs() + 0.5).floor() * share.sign()).to(dtype)


LIBRARIES = {
    "flashoptim": Library(_read_flashoptim, _write_flashoptim, {}, FLASH_OPTIONS),
    "flashoptim-float": Library(_read_flashoptim, _write_flashoptim_float, {}, FLASH_OPTIONS),
}
