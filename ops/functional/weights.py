"""Joins 16-bit weights and their residuals to float32 numbers, and splits them again: the ops
``headroom::join_weights_`` and ``headroom::split_weights_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import COUNTERS, check_list, check_scalars, lr_arguments
from .._core.registration import FLOATS, complete, require
from .._core.weight_modes import HALVES, MODES, weights_mode


def op_arguments(
    params: Sequence[Tensor],
    lr: float | Tensor,
    *,
    master: str | None = None,
    rounding: str = "nearest",
    weight_seeds: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
    **scalars: Tensor | None,
) -> dict[str, Any]:
    """Returns the arguments that the ops of all optimizers take, from those of their functions."""
    return {
        **lr_arguments(lr, params[0].device),
        **scalars,
        "weights_mode": weights_mode(master, rounding).number,
        "weight_seeds": None if weight_seeds is None else list(weight_seeds),
        "places": None if places is None else list(places),
    }


def check_step(
    params: list[Tensor],
    grads: list[Tensor],
    state_steps: list[Tensor],
    residuals: list[Tensor],
    options: dict[str, Any],
    counts: bool = True,
) -> None:
    """Checks the arguments that the ops of all optimizers take, in their fakes; ``counts`` says
    whether there must be counters."""
    check_list("params", params, params, FLOATS)
    check_list("grads", grads, params, FLOATS)
    counted = params if counts else []
    check_list("state_steps", state_steps, counted, COUNTERS, [1] * len(counted))
    check_scalars(options, params)
    _check_weights(params, residuals, options)


def _check_weights(params: list[Tensor], residuals: list[Tensor], options: dict[str, Any]) -> None:
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
        stalled is None
        or (
            stalled.numel() == 1
            and stalled.dtype == torch.int64
            and all(stalled.device == param.device for param in params[:1])
        ),
        "stalled must be an int64 tensor of one element, with the parameters",
    )


def _check(values, params, residuals):
    check_list("params", params, params, FLOATS)
    check_list("values", values, params, (torch.float32,))
    require(len(residuals) in (0, len(params)), "residuals must be none, or as many as params")
    if residuals:
        dtypes = (torch.float32, torch.int16, torch.int8, *HALVES)
        check_list("residuals", residuals, params, dtypes)


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
    """Writes the float32 numbers that 16-bit weights and their residuals stand for.

    Args:
        values: float32 tensors of the shapes of ``params``, on their device; written.
        params: the weights of the model; not changed.
        residuals: the tensors that the mode keeps beside them, as in :func:`adamw_`; not changed.
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
    """Writes ``params`` and ``residuals`` from float32 numbers, rounded to nearest: the inverse of
    :func:`join_weights_`."""
    if params:
        mode = weights_mode(master, rounding)
        torch.ops.headroom.split_weights_(params, list(residuals), values, mode.number)
