"""What Headroom's own operations allocate inside, as their C functions say."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from .._core.binaries import LIBRARY_DIR
from .inside import Sizes, entry

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Config(ctypes.Structure):
    """``hr_mlp_config`` of ``headroom.h``."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("norm", "casting", "activation", "dtype")),
        *((name, ctypes.c_int) for name in ("norm_dtype", "gated", "residual")),
        ("eps", ctypes.c_double),
        ("offset", ctypes.c_double),
        ("tile_tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("tf32", "reduced", "deterministic", "reserved")),
    ]


class _Needs(ctypes.Structure):
    """``hr_mlp_needs`` of ``headroom.h``."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("mean", "rstd", "normed", "gate_up", "activated")),
        ("forward_workspace", ctypes.c_size_t),
        ("backward_workspace", ctypes.c_size_t),
        ("tile_tokens", ctypes.c_int64),
        ("reads_x", ctypes.c_int32),
    ]


class _Exec(ctypes.Structure):
    """``hr_exec`` of ``headroom.h``; the CPU's."""

    _fields_ = [("device", ctypes.c_int32), ("stream", ctypes.c_void_p)]


@cache
def _query() -> Any:
    library = ctypes.CDLL(str(next(LIBRARY_DIR.glob("libheadroom.so.*"))))
    sizes = [ctypes.c_int64] * 3
    pointers = [ctypes.c_void_p] * 2
    library.hr_mlp_query.argtypes = [
        ctypes.c_void_p, *sizes, ctypes.c_int, ctypes.c_uint32, *pointers,
    ]  # fmt: skip
    return library.hr_mlp_query


def _needs(
    x: Any, gate_up: Any, up: Any, down: Any, norm: Any, numbers: Sequence[Any]
) -> _Needs | None:
    kind, casting, offset, activation, residual, tile, save, wanted = numbers
    features = down.shape[1]
    gated = up is not None or gate_up.shape[0] != features
    config = _Config(
        ctypes.sizeof(_Config), kind, casting, activation, _DTYPES[x.dtype],
        _DTYPES[norm.dtype if norm is not None else x.dtype], gated, residual,
        0.0, offset, tile,
    )  # fmt: skip
    needs, on = _Needs(), _Exec(-1, None)
    sizes = prod(x.shape[:-1]), x.shape[-1], features
    status = _query()(
        ctypes.byref(needs), *sizes, save, wanted, ctypes.byref(config), ctypes.byref(on)
    )
    return needs if status == 0 else None


@entry("headroom::mlp_block")
def _mlp(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    x, norm_weight, norm_bias, gate_up, up, down = args[:6]
    norm, casting, _, offset, activation, residual, tile, save, wanted = args[9:18]
    vector = norm_weight if norm_weight is not None else norm_bias
    numbers = norm, casting, offset, activation, residual, tile, save, wanted
    needs = _needs(x, gate_up, up, down, vector, numbers)
    return [] if needs is None else [(needs.forward_workspace, "temporaries")]


@entry("headroom::mlp_block_backward")
def _mlp_backward(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    dy, _, norm_weight, norm_bias, gate_up, up, down = args[:7]
    norm, casting, offset, activation, residual, tile, save, wanted = args[14:22]
    vector = norm_weight if norm_weight is not None else norm_bias
    numbers = norm, casting, offset, activation, residual, tile, save, wanted
    needs = _needs(dy, gate_up, up, down, vector, numbers)
    return [] if needs is None else [(needs.backward_workspace, "temporaries")]
