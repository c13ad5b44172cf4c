"""What Headroom's own operations allocate inside, as their C functions say."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .._core.binaries import LIBRARY_DIR
from ..functional import kept_gradients, linear_divergence
from ..functional.linear_cross_entropy import BIAS, HIDDEN, ROUND_EACH_CHUNK, WEIGHT
from .inside import BODIES, Sizes, entry

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
        *((name, ctypes.c_int32) for name in ("allow_tf32", "allow_reduced_precision_reduction")),
        *((name, ctypes.c_int32) for name in ("deterministic", "reserved")),
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
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(next(LIBRARY_DIR.glob("libheadroom.so.*"))))


@cache
def _query() -> Any:
    library = _library()
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


class _LossConfig(ctypes.Structure):
    """``hr_linear_cross_entropy_config`` of ``headroom.h``."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("dtype", "grad_dtype", "target_bytes")),
        *((name, ctypes.c_int) for name in ("reduction", "mode", "round_each_chunk")),
        *((name, ctypes.c_int) for name in ("add_to_weight_grads", "allow_tf32")),
        *((name, ctypes.c_int) for name in ("allow_reduced_precision_reduction", "deterministic")),
        ("ignore_index", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("label_smoothing", "softcap", "z_loss")),
        ("logit_scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("sequence", "first_class", "all_classes")),
        ("most_counted", ctypes.c_int64),
        ("workspace_limit", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in ("check_target", "reserved")),
    ]


class _LossNeeds(ctypes.Structure):
    """``hr_linear_cross_entropy_needs`` of ``headroom.h``."""

    _fields_ = [
        ("workspace", ctypes.c_size_t),
        *((name, ctypes.c_int64) for name in ("rows", "classes")),
        ("mode", ctypes.c_int),
    ]


@cache
def _loss_query() -> Any:
    query = _library().hr_linear_cross_entropy_query
    sizes = [ctypes.c_int64] * 3
    query.argtypes = [ctypes.c_void_p, *sizes, ctypes.c_uint32, *[ctypes.c_void_p] * 2]
    return query


def _loss_workspace(
    hidden: Any, weight: Any, numbers: Sequence[Any], wanted: int, device: str, adds: bool = False
) -> Sizes:
    """``numbers`` are the arguments from label_smoothing to options."""
    *floats, mode, limit, most, first, classes, options = numbers
    dtype = _DTYPES[hidden.dtype]
    config = _LossConfig(
        ctypes.sizeof(_LossConfig), dtype, 0 if dtype == 2 else dtype, 8,
        0, mode, options & ROUND_EACH_CHUNK != 0, adds, 0, 0,
        0, -100, *floats, 0, first, classes, most, limit,
    )  # fmt: skip
    sizes = prod(hidden.shape[:-1]), hidden.shape[-1], weight.shape[0]
    needs = _LossNeeds()
    # Where there is no such device, the answer for the CPU is the best there is.
    for place in (0, -1) if device == "cuda" else (-1,):
        status = _loss_query()(
            ctypes.byref(needs), *sizes, wanted, ctypes.byref(config),
            ctypes.byref(_Exec(place, None)),
        )  # fmt: skip
        if status == 0:
            return [(needs.workspace, "temporaries")]
    return []


@entry("headroom::linear_cross_entropy")
def _loss(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    return _loss_workspace(*args[:2], args[9:19], args[20], device)


@entry("headroom::linear_cross_entropy_backward")
def _loss_backward(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    return _loss_workspace(*args[1:3], args[11:21], args[21], device)


@entry("headroom::linear_cross_entropy_backward_")
def _loss_backward_in_place(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Sizes:
    grads = {HIDDEN: args[23], WEIGHT: args[10] is not None, BIAS: args[11] is not None}
    wanted = sum(bit for bit, is_wanted in grads.items() if is_wanted)
    return _loss_workspace(*args[1:3], args[13:23], wanted, device, adds=True)


def _all_rows(ignored: Tensor) -> Tensor:
    """Returns the numbers of all rows: at most these count."""
    ignored.flatten().logical_not()
    return torch.arange(ignored.numel(), device=ignored.device)


BODIES["headroom::linear_divergence"] = partial(linear_divergence.forward_of, find=_all_rows)
BODIES["headroom::linear_divergence_scale"] = linear_divergence.scale_of
BODIES["headroom::linear_divergence_backward"] = partial(
    linear_divergence.backward_of, find=_all_rows
)


def fakes_overwritten() -> Any:
    """Lets the loss scale gradients of fakes in place, as it does those of tensors: only these have
    the type that it asks for."""
    is_free, tensor = kept_gradients.may_overwrite, torch.empty(0)
    return mock.patch.object(kept_gradients, "may_overwrite", lambda kept: is_free(tensor))
