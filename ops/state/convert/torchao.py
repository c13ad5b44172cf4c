"""Writes states of torchao's 8-bit Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...functional.dynamic_map import dynamic_map
from .adam import read_adam, write_torch
from .codes import codes_of, floats_of
from .neutral import Context, Library, State, cast

__all__ = ["LIBRARIES"]


def _write_torchao_8bit(state: State, context: Context) -> dict[str, Any]:
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ImportError("to='torchao-8bit' needs the package torchao") from error
    entry = write_torch(State(state.step, {}), context)
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


LIBRARIES = {
    "torchao-8bit": Library(read_adam, _write_torchao_8bit, {"amsgrad": False}, casts=True),
}
