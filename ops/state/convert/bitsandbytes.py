"""Reads and writes states of bitsandbytes' Adam and AdamW: 32-bit, 8-bit, and the 8-bit form of
releases before 2026."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...functional.dynamic_map import dynamic_map
from .codes import Codes, check_map, codes_of, floats_of
from .neutral import Context, Library, State

BNB_WRAPPER = "__bnb_optimizer_quant_state__"
BNB_BLOCK_SIZES = (256, 2048, 4096, 1024, 512, 128, 64)  # 2048 before 0.44
BNB_OPTIONS = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}


def _read_bitsandbytes(entry: dict[str, Any], context: Context) -> State:
    entry = entry | entry.get(BNB_WRAPPER, {})
    if "state2" not in entry or entry["state1"].shape != entry["state2"].shape:
        raise ValueError("is of an optimizer of bitsandbytes that is not Adam or AdamW")
    moments: dict[str, Tensor | Codes] = {}
    for name, i in (("exp_avg", 1), ("exp_avg_sq", 2)):
        moment = moments[name] = entry[f"state{i}"]
        if moment.dtype == torch.uint8:
            absmax = entry[f"absmax{i}"]
            numel, blocks = moment.numel(), absmax.numel()
            size = next((b for b in BNB_BLOCK_SIZES if -(-numel // b) == blocks), 256)
            check_map(entry[f"qmap{i}"], i == 1)
            moments[name] = Codes(moment.contiguous(), absmax, size, i == 1)
    return State(entry["step"], moments)


def _write_bitsandbytes(state: State, context: Context) -> dict[str, Any]:
    names = ("exp_avg", "exp_avg_sq")
    moments = {f"state{i}": floats_of(state.moments[n]).float() for i, n in enumerate(names, 1)}
    return {"step": int(state.step), BNB_WRAPPER: moments}


def _write_bitsandbytes_8bit(state: State, context: Context) -> dict[str, Any]:
    if not context.is_8bit(state.moments["exp_avg"]):
        return _write_bitsandbytes(state, context)
    inner: dict[str, Any] = {}
    for i, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
        codes = codes_of(state.moments[name], 256, i == 1)
        inner[f"state{i}"], inner[f"absmax{i}"] = codes.codes, codes.absmax
        inner[f"qmap{i}"] = dynamic_map(i == 1).to(codes.codes.device)
    return {"step": int(state.step), BNB_WRAPPER: inner}


def _write_bitsandbytes_flat(state: State, context: Context) -> dict[str, Any]:
    entry = _write_bitsandbytes_8bit(state, context)
    return {"step": entry["step"], **entry[BNB_WRAPPER]}


LIBRARIES = {
    "bitsandbytes": Library(_read_bitsandbytes, _write_bitsandbytes, BNB_OPTIONS),
    "bitsandbytes-8bit": Library(_read_bitsandbytes, _write_bitsandbytes_8bit, BNB_OPTIONS),
    "bitsandbytes-8bit-flat": Library(_read_bitsandbytes, _write_bitsandbytes_flat, BNB_OPTIONS),
}
