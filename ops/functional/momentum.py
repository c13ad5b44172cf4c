"""Steps SGD and Lion on lists of tensors: the op ``headroom::momentum_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_list
from .._core.registration import FLOATS, complete, require
from .adamw8bit import BLOCK_SIZES
from .weights import check_step, op_arguments

CODES = (torch.uint8,)
SGD, LION = 0, 1  # the numbers of the rules in headroom.h


def sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    absmaxs: Sequence[Tensor] = (),
    block_size: int = 256,
    skip_nonfinite: bool = False,
    residuals: Sequence[Tensor] = (),
    **step: Any,
) -> None:
    """Steps SGD on a list of parameters, in place and in one pass.

    The functional form of :class:`headroom.optim.SGD`. Entry k of every list belongs to parameter
    k; all lie on one device.

    Args:
        params: float32, bfloat16 or float16 tensors of any shape and strides; updated.
        grads: tensors of the same shapes, each float32, bfloat16 or float16; not changed.
        momentum_buffers: shaped like params, float32, bfloat16 or float16, zeros before the first
            step; or, with ``absmaxs``, uint8 codes; updated. Empty if ``momentum`` is 0.
        state_steps: float32 or float64 tensors of one element, the steps before this one; each
            grows by 1. The buffer of the first step is the gradient, whatever the dampening. Empty:
            it is the first step, which matters to buffers and to stochastic rounding alone.
        lr: learning rate; a tensor of one element is read on its device.
        absmaxs: scales of the blocks of 8-bit buffers, contiguous float32 tensors of
            ``ceil(numel / block_size)`` elements, zeros before the first step; updated.
        block_size: 64, 128, 256 or 512 elements, of 8-bit buffers.
        skip_nonfinite: leave parameters and buffers as they are where the gradient is infinite or
            NaN.
        residuals, step: ``grad_scale``, ``found_inf``, ``clip_coef``, ``master``, ``rounding``,
            ``weight_seeds``, ``places`` and ``stalled``, as in :func:`adamw_`.

    Raises:
        RuntimeError: shapes, devices or dtypes do not fit, an option is out of range, or a tensor
            requires grad outside ``torch.no_grad()`` (the op has no derivative). The message names
            the argument. Nothing has been written then.

    The update, its source and its rounding are documented at ``hr_momentum`` in ``headroom.h``.
    """
    if params:
        torch.ops.headroom.momentum_(
            params,
            grads,
            momentum_buffers,
            list(absmaxs),
            state_steps,
            list(residuals),
            **op_arguments(params, lr, **step),
            **sgd_options(momentum, dampening, nesterov),
            weight_decay=weight_decay,
            maximize=maximize,
            block_size=block_size,
            skip_nonfinite=skip_nonfinite,
        )


def lion_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    maximize: bool = False,
    absmaxs: Sequence[Tensor] = (),
    block_size: int = 256,
    skip_nonfinite: bool = False,
    residuals: Sequence[Tensor] = (),
    **step: Any,
) -> None:
    """Steps Lion on a list of parameters, in place and in one pass.

    The functional form of :class:`headroom.optim.Lion`.

    Args:
        exp_avgs: shaped like params, float32, bfloat16 or float16, zeros before the first step; or,
            with ``absmaxs``, uint8 codes; updated.
        params, grads, state_steps, lr, absmaxs, block_size, skip_nonfinite, residuals, step: as in
            :func:`sgd_`.

    Raises:
        RuntimeError: as :func:`sgd_` does.

    The update, its source and its rounding are documented at ``hr_momentum`` in ``headroom.h``.
    """
    if params:
        torch.ops.headroom.momentum_(
            params,
            grads,
            exp_avgs,
            list(absmaxs),
            state_steps,
            list(residuals),
            **op_arguments(params, lr, **step),
            **lion_options(beta1, beta2),
            weight_decay=weight_decay,
            maximize=maximize,
            block_size=block_size,
            skip_nonfinite=skip_nonfinite,
        )


def sgd_options(momentum: float, dampening: float, nesterov: bool) -> dict[str, Any]:
    """Returns the op's arguments that make it SGD."""
    own = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    return {"rule": SGD, "beta1": 0.0, "beta2": 0.0} | own


def lion_options(beta1: float, beta2: float) -> dict[str, Any]:
    """Returns the op's arguments that make it Lion."""
    own = {"beta1": beta1, "beta2": beta2}
    return {"rule": LION, "momentum": 0.0, "dampening": 0.0, "nesterov": False} | own


@torch.library.register_fake("headroom::momentum_")
def _(
    params,
    grads,
    moments,
    absmaxs,
    state_steps,
    residuals,
    *,
    rule,
    momentum,
    block_size=256,
    **options,
):
    require(rule in (SGD, LION), f"rule is {rule}, wanted {SGD} or {LION}")
    check_step(params, grads, state_steps, residuals, options, counts=bool(state_steps))
    has_moments = rule == LION or momentum != 0
    check_list("moments", moments, params if has_moments else [], CODES if absmaxs else FLOATS)
    if absmaxs:
        require(
            block_size in BLOCK_SIZES, f"block_size is {block_size}, wanted one of {BLOCK_SIZES}"
        )
        blocks = [-(-param.numel() // block_size) for param in params]
        wanted = params if has_moments else []
        check_list("absmaxs", absmaxs, wanted, (torch.float32,), blocks)
        for k, absmax in enumerate(absmaxs):
            require(absmax.is_contiguous(), f"absmaxs[{k}] must be contiguous")


complete("momentum_")
