"""Weights of 16 bits: what an optimizer keeps beside them, and the ops ``headroom::join_weights_``
and ``headroom::split_weights_``.

A bfloat16 weight has 8 bits, so an update below 1/256 of it is lost. ``master`` keeps what rounding
took off in a second tensor, the residual; ``rounding`` says how to round. The modes, their errors
and what becomes of a weight that something else writes between two steps are documented at
``hr_weights`` in ``headroom.h``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ._adamw_options import check_list
from ._registration import FLOATS, complete, require
from .unscale_norm import local_part

if TYPE_CHECKING:
    from .optimizer import Optimizer

__all__ = [
    "NEAREST",
    "RESIDUALS",
    "WeightsMode",
    "check_weight_options",
    "check_weights",
    "join_weights_",
    "load_master_weights",
    "master_weights",
    "mode_of",
    "place_of",
    "split_weights_",
    "weight_seeds",
    "weights_mode",
]

MASTERS = (None, "f32", "remainder16", "remainder8")
ROUNDINGS = ("nearest", "stochastic", "kahan")
HALVES = (torch.bfloat16, torch.float16)
RESIDUALS = ("compensation", "master", "remainder")  # their names in a parameter's state


class WeightsMode(NamedTuple):
    """How the parameters of a group are stored."""

    number: int  # hr_weights_mode
    residual: str | None = None  # its name in the state
    dtype: torch.dtype | None = None  # of the residual; None: the parameter's
    params: tuple[torch.dtype, ...] = HALVES  # that it is for
    is_random: bool = False


NEAREST = WeightsMode(0, params=FLOATS)
MODES = {
    (None, "nearest"): NEAREST,
    (None, "stochastic"): WeightsMode(1, is_random=True),
    (None, "kahan"): WeightsMode(2, "compensation"),
    ("f32", "nearest"): WeightsMode(3, "master", torch.float32),
    ("remainder16", "nearest"): WeightsMode(4, "remainder", torch.int16, HALVES[:1]),
    ("remainder8", "nearest"): WeightsMode(5, "remainder", torch.int8, HALVES[:1]),
    ("remainder8", "stochastic"): WeightsMode(6, "remainder", torch.int8, HALVES[:1], True),
}


def weights_mode(master: str | None = None, rounding: str = "nearest") -> WeightsMode:
    """The mode of two options.

    Raises:
        ValueError: there is no such mode.
    """
    if master not in MASTERS:
        raise ValueError(f"master must be one of {MASTERS}, got {master!r}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")
    if (master, rounding) not in MODES:
        raise ValueError(
            f"master={master!r} does not go with rounding={rounding!r}: it leaves nothing to round "
            "so. Stochastic rounding goes with master=None or 'remainder8', Kahan with master=None"
        )
    return MODES[master, rounding]


def mode_of(group: dict[str, Any]) -> WeightsMode:
    """Of a group's parameters of 16 bits; those in float32 are as they are."""
    return weights_mode(group.get("master"), group.get("rounding", "nearest"))


def check_weight_options(options: dict[str, Any]) -> None:
    """Refuses options of a group that do not fit each other, or its parameters."""
    mode = mode_of(options)
    seed = options.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2^32 - 1, got {seed}")
    params = options.get("params", ())
    params = [params] if isinstance(params, Tensor) else params
    for param in params if isinstance(params, Sequence) else ():
        param = param[1] if isinstance(param, tuple) else param
        if isinstance(param, Tensor) and param.dtype in HALVES and param.dtype not in mode.params:
            raise ValueError(
                f"master={options.get('master')!r} needs bfloat16 weights: float16 has fewer "
                f"exponents than float32, so 16 bits more do not complete it. Got {param.dtype}; "
                "use master='f32'"
            )


# ---- Randomness ----------------------------------------------------------------------------------


def weight_seeds(seed: int, places: Iterable[int]) -> list[int]:
    """Distinct for every parameter, by its place in the optimizer: the same on all ranks."""
    return [((seed << 32) + place % 2**32 + 2**63) % 2**64 - 2**63 for place in places]


def place_of(param: Tensor) -> tuple[int, int, int]:
    """Where the local elements of a parameter are in the whole: hr_place."""
    if not isinstance(param, DTensor):
        return 0, max(param.numel(), 1), 0
    local, offsets = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    cut = [dim for dim, size in enumerate(param.shape) if local[dim] != size]
    if not cut or 0 in local:
        return 0, max(math.prod(local), 1), 0
    last = cut[-1]
    if any(math.prod(param.shape[:dim]) > 1 for dim in cut[:-1]):
        raise NotImplementedError(
            "stochastic rounding takes DTensors that are sharded along one dimension, or along the "
            f"first and another; got {param.placements}"
        )
    inner = math.prod(param.shape[last + 1 :])
    row = 0  # how many rows of the dimensions before the last cut one lie before the shard
    for dim in range(last):
        row = row * param.shape[dim] + offsets[dim]
    stride = param.shape[last] * inner
    return row * stride + offsets[last] * inner, local[last] * inner, stride


# ---- The ops -------------------------------------------------------------------------------------


def check_weights(params: list[Tensor], residuals: list[Tensor], options: dict[str, Any]) -> None:
    """For fakes of optimizers' ops."""
    number = options.get("weights_mode", 0)
    mode = next((mode for mode in MODES.values() if mode.number == number), None)
    require(mode is not None, f"weights_mode is {number}, wanted 0 to 6")
    wanted = params if mode.residual else []
    dtypes = (mode.dtype,) if mode.dtype else HALVES
    check_list("params", params, params, mode.params)
    check_list("residuals", residuals, wanted, dtypes)
    seeds, places = options.get("weight_seeds"), options.get("places")
    require(
        (len(seeds) if seeds is not None else 0) == (len(params) if mode.is_random else 0),
        "weight_seeds must be as many as params for a stochastic mode, else None",
    )
    require(places is None or len(places) == 3 * len(params), "places must be 3 for each parameter")
    stalled = options.get("stalled")
    require(
        stalled is None or (stalled.numel() == 1 and stalled.dtype == torch.int64),
        "stalled must be an int64 tensor of one element",
    )


def _check(values, params, residuals):
    check_list("params", params, params, FLOATS)
    check_list("values", values, params, (torch.float32,))
    require(len(residuals) in (0, len(params)), "residuals must be none, or as many as params")


@torch.library.register_fake("headroom::join_weights_")
def _(values, params, residuals, weights_mode):
    _check(values, params, residuals)


@torch.library.register_fake("headroom::split_weights_")
def _(params, residuals, values, weights_mode):
    _check(values, params, residuals)


complete("join_weights_")
complete("split_weights_")


def join_weights_(
    values: list[Tensor],
    params: list[Tensor],
    residuals: Sequence[Tensor] = (),
    *,
    master: str | None = None,
    rounding: str = "nearest",
) -> None:
    """Writes weights to float32 tensors, as an optimizer's op reads them.

    Args:
        values: float32 tensors of the shapes of ``params``, on their device; written.
        params: what the model has; not changed.
        residuals: what the mode keeps beside them, as in :func:`adamw_`; not changed.
        master, rounding: the mode; see :class:`headroom.optim.Adam`.

    Raises:
        RuntimeError: shapes, devices or dtypes do not fit. Nothing has been written then.
    """
    if params:
        mode = weights_mode(master, rounding)
        torch.ops.headroom.join_weights_(values, params, list(residuals), mode.number)


def split_weights_(
    params: list[Tensor],
    residuals: Sequence[Tensor],
    values: list[Tensor],
    *,
    master: str | None = None,
    rounding: str = "nearest",
) -> None:
    """The way back of :func:`join_weights_`: writes ``params`` and ``residuals``, to nearest."""
    if params:
        mode = weights_mode(master, rounding)
        torch.ops.headroom.split_weights_(params, list(residuals), values, mode.number)


# ---- What users call -----------------------------------------------------------------------------


def master_weights(optimizer: Optimizer, model: nn.Module | None = None) -> dict[Any, Tensor]:
    """The weights of an optimizer's parameters as float32: those that its next step starts from.

    To evaluate or save a model without the rounding of its 16-bit weights. Where a parameter was
    written since the last step, it is what was written: see :class:`headroom.optim.Adam`.

    Args:
        optimizer: one of :mod:`headroom.optim`.
        model: whose parameters they are.

    Returns:
        With ``model``, a state dict of it: its parameters as float32 tensors, detached copies, and
        its buffers as they are. Without, a dict from each parameter of the optimizer to its
        float32 tensor. DTensors stay DTensors.
    """
    joined: dict[Any, Tensor] = {}
    with torch.no_grad():
        for param, mode, residual in _weights(optimizer):
            value = param.detach().to(torch.float32, copy=True)
            if mode.residual and residual is not None:
                lists = [local_part(value)], [local_part(param)], [local_part(residual)]
                torch.ops.headroom.join_weights_(*lists, mode.number)
            joined[param] = value
    if model is None:
        return joined
    return {
        name: joined.get(
            tensor,
            tensor.detach().float()
            if tensor.is_floating_point() and isinstance(tensor, nn.Parameter)
            else tensor.detach(),
        )
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def load_master_weights(
    optimizer: Optimizer, weights: Mapping[Any, Tensor], model: nn.Module | None = None
) -> None:
    """Sets parameters, and what the optimizer keeps beside them, from float32 weights: the way back
    of :func:`master_weights`. Nothing is lost that the optimizer's mode can keep, and nothing is
    left of the old weights, as there may be after writing to the parameters alone.

    Args:
        optimizer: one of :mod:`headroom.optim`.
        weights: what :func:`master_weights` returned, for these parameters or this model. With
            ``model``, entries for buffers are copied too.
        model: whose names ``weights`` has.

    Raises:
        KeyError: a parameter of the optimizer is missing from ``weights``.
        ValueError: a shape does not fit. Nothing has been changed then.
    """
    if model is not None:
        tensors = model.state_dict(keep_vars=True)
        missing = [name for name in tensors if name not in weights]
        if missing:
            raise KeyError(f"the weights have no {', '.join(map(repr, missing))}")
        by_tensor: dict[Any, Tensor] = {tensors[name]: weights[name] for name in tensors}
    else:
        by_tensor = dict(weights)
    entries = list(_weights(optimizer, create=True))
    for param, *_ in entries:
        if param not in by_tensor:
            raise KeyError(f"the weights have no {optimizer._name_of(param)}")
    for tensor, value in by_tensor.items():
        if tensor.shape != value.shape:
            raise ValueError(
                f"a weight has shape {tuple(value.shape)}, but its tensor {tuple(tensor.shape)}"
            )
    with torch.no_grad():
        for param, mode, residual in entries:
            value = by_tensor.pop(param).to(param.device, torch.float32)
            if mode.residual is None:
                param.copy_(value)
                continue
            lists = [local_part(param)], [local_part(residual)], [local_part(value)]
            torch.ops.headroom.split_weights_(*lists, mode.number)
        for tensor, value in by_tensor.items():
            tensor.copy_(value)


def _weights(
    optimizer: Optimizer, create: bool = False
) -> Iterable[tuple[Tensor, WeightsMode, Tensor | None]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            mode = optimizer._weights_mode(param, group)
            if mode.residual and create:
                optimizer._entry(param, group)
            yield param, mode, optimizer.state.get(param, {}).get(mode.residual)
