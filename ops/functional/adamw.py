"""Steps Adam and AdamW on lists of tensors: the op ``headroom::adamw_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_list
from .._core.registration import FLOATS, complete, require
from .weights import check_step, op_arguments


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = True,
    skip_nonfinite: bool = False,
    residuals: Sequence[Tensor] = (),
    **step: Any,
) -> None:
    """Steps AdamW, or Adam, on a list of parameters, in place and in one pass.

    The functional form of :class:`headroom.optim.AdamW`, with the argument order of
    ``torch._fused_adamw_``. Entry k of every list belongs to parameter k; all lie on one device.

    Args:
        params: float32, bfloat16 or float16 tensors of any shape and strides; updated.
        grads: tensors of the same shapes, each float32, bfloat16 or float16; not changed.
        exp_avgs, exp_avg_sqs: first and second moments, shaped like params, float32, bfloat16 or
            float16, one dtype per parameter; updated. Zeros before the first step.
        max_exp_avg_sqs: like exp_avg_sqs if ``amsgrad``, else empty; updated.
        state_steps: float32 or float64 tensors of one element, the steps before this one; each
            grows by 1.
        lr: learning rate; a tensor of one element is read on its device.
        decoupled: decay weights as AdamW does; False adds the decay to the gradient, as Adam does.
        skip_nonfinite: leave parameters and moments as they are where the gradient is infinite or
            NaN.
        residuals: the tensors that the mode of storing 16-bit parameters keeps beside them, shaped
            like params: float32 with ``master="f32"``, int16 with ``"remainder16"``, int8 with
            ``"remainder8"``, the parameter's dtype with ``rounding="kahan"``, else none; updated.
        step: what the functions of all optimizers take:

            - grad_scale: float32 tensor of one element; gradients are divided by it.
            - found_inf: float32 tensor of one element; if it is not 0, nothing changes, steps
              included.
            - clip_coef: float32 tensor of one element; gradients are multiplied by it.
            - master, rounding: the mode; see :class:`headroom.optim.Adam`.
            - weight_seeds: with ``rounding="stochastic"``, a 64-bit number for each parameter.
            - places: offset, run and stride of each parameter in the tensor that it is a shard of,
              for stochastic rounding: element i is ``offset + i // run * stride + i % run`` of it.
            - stalled: int64 tensor of one element; grows by the number of weights that float32
              would have moved and whose stored value did not change.

    Raises:
        RuntimeError: shapes, devices or dtypes do not fit, an option is out of range, or a tensor
            requires grad outside ``torch.no_grad()`` (the op has no derivative). The message names
            the argument. Nothing has been written then.

    The update, its source and its rounding are documented at ``hr_adamw`` in ``headroom.h``.
    """
    if not params:
        return
    torch.ops.headroom.adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        list(residuals),
        **op_arguments(params, lr, **step),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        decoupled=decoupled,
        skip_nonfinite=skip_nonfinite,
    )


@torch.library.register_fake("headroom::adamw_")
def _(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    state_steps,
    residuals,
    *,
    amsgrad,
    **options,
):
    check_step(params, grads, state_steps, residuals, options)
    check_list("exp_avgs", exp_avgs, params, FLOATS)
    check_list("exp_avg_sqs", exp_avg_sqs, params, FLOATS)
    check_list("max_exp_avg_sqs", max_exp_avg_sqs, params if amsgrad else [], FLOATS)
    for name, tensors in (("exp_avg_sqs", exp_avg_sqs), ("max_exp_avg_sqs", max_exp_avg_sqs)):
        for k, (tensor, like) in enumerate(zip(tensors, exp_avgs)):
            require(
                tensor.dtype == like.dtype,
                f"{name}[{k}] is {tensor.dtype}, exp_avgs[{k}] {like.dtype}",
            )


complete("adamw_")
