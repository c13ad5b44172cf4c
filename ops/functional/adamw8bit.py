"""Steps Adam and AdamW with 8-bit moments on lists of tensors: the op ``headroom::adamw8bit_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_list
from .._core.registration import complete, require
from .weights import check_step, op_arguments

BLOCK_SIZES = (64, 128, 256, 512)


def adamw8bit_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_absmaxs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_sq_absmaxs: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool = False,
    decoupled: bool = True,
    block_size: int = 256,
    skip_nonfinite: bool = False,
    bnb_exact: bool = False,
    seeds: Sequence[int] | None = None,
    residuals: Sequence[Tensor] = (),
    **step: Any,
) -> None:
    """Steps AdamW, or Adam, with moments of one byte, in place and in one pass.

    A moment is a code of the dynamic map for each element and a float32 scale for each block of
    ``block_size`` consecutive elements: ``dynamic_map(...)[code] * absmax``. Entry k of every list
    belongs to parameter k; all lie on one device.

    Args:
        params: float32, bfloat16 or float16 tensors of any shape and strides; updated. Blocks
            follow the order in memory of a dense tensor, else the order of the indices.
        grads: tensors of the same shapes, each float32, bfloat16 or float16; not changed.
        exp_avgs, exp_avg_sqs: codes of the first and second moments, uint8, shaped like params;
            fastest with the parameter's strides; updated. Their values before the first step do
            not matter.
        exp_avg_absmaxs, exp_avg_sq_absmaxs: scales of the blocks, contiguous float32 tensors of
            ``ceil(numel / block_size)`` elements; updated. Zeros before the first step.
        state_steps: float32 or float64 tensors of one element, the steps before this one; each
            grows by 1.
        lr: learning rate; a tensor of one element is read on its device.
        decoupled: decay weights as AdamW does; False adds the decay to the gradient, as Adam does.
        block_size: 64, 128, 256 or 512 elements.
        skip_nonfinite: leave parameters and moments as they are where the gradient is infinite or
            NaN. Otherwise such a gradient makes the moments of its block NaN for good.
        bnb_exact: the rule of bitsandbytes' CUDA kernels, step for step; needs decoupled weight
            decay, blocks of 256, no seeds, no ``skip_nonfinite``, and no ``master`` or
            ``rounding``. It lets a second moment round to zero, and then an update can be thousands
            of times ``lr``.
            (bitsandbytes on a CPU quantizes more coarsely: of the squares of 65,536 normal numbers
            about 2,000 get another code.)
        seeds: a 64-bit number for each parameter: codes are rounded stochastically, and depend only
            on seed, step, element and values. None: codes are rounded to nearest.
        residuals, step: ``grad_scale``, ``found_inf``, ``clip_coef``, ``master``, ``rounding``,
            ``weight_seeds``, ``places`` and ``stalled``, as in :func:`adamw_`.

    Raises:
        RuntimeError: shapes, devices or dtypes do not fit, an option is out of range, or a tensor
            requires grad outside ``torch.no_grad()`` (the op has no derivative). The message names
            the argument. Nothing has been written then.

    The update, its sources and its rounding are documented at ``hr_adamw8bit`` in ``headroom.h``.
    """
    if not params:
        return
    torch.ops.headroom.adamw8bit_(
        params,
        grads,
        exp_avgs,
        exp_avg_absmaxs,
        exp_avg_sqs,
        exp_avg_sq_absmaxs,
        state_steps,
        list(residuals),
        **op_arguments(params, lr, **step),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        decoupled=decoupled,
        block_size=block_size,
        skip_nonfinite=skip_nonfinite,
        bnb_exact=bnb_exact,
        seeds=None if seeds is None else [signed(seed) for seed in seeds],
    )


def signed(seed: int) -> int:
    """Returns the 64 bits of a seed as a signed integer, which torch takes."""
    return (seed + 2**63) % 2**64 - 2**63


@torch.library.register_fake("headroom::adamw8bit_")
def _(
    params,
    grads,
    exp_avgs,
    exp_avg_absmaxs,
    exp_avg_sqs,
    exp_avg_sq_absmaxs,
    state_steps,
    residuals,
    *,
    decoupled,
    block_size=256,
    skip_nonfinite=False,
    bnb_exact=False,
    seeds=None,
    **options,
):
    codes, scales = (torch.uint8,), (torch.float32,)
    require(block_size in BLOCK_SIZES, f"block_size is {block_size}, wanted one of {BLOCK_SIZES}")
    require(
        not bnb_exact or (decoupled and block_size == 256 and not skip_nonfinite and seeds is None),
        "bnb_exact needs decoupled weight decay, block_size 256, no seeds, not skip_nonfinite",
    )
    require(seeds is None or len(seeds) == len(params), "seeds must be as many as params")
    check_step(params, grads, state_steps, residuals, options)
    check_list("exp_avgs", exp_avgs, params, codes)
    check_list("exp_avg_sqs", exp_avg_sqs, params, codes)
    blocks = [-(-param.numel() // block_size) for param in params]
    for name, absmaxs in (
        ("exp_avg_absmaxs", exp_avg_absmaxs),
        ("exp_avg_sq_absmaxs", exp_avg_sq_absmaxs),
    ):
        check_list(name, absmaxs, params, scales, blocks)
        for k, absmax in enumerate(absmaxs):
            require(absmax.is_contiguous(), f"{name}[{k}] must be contiguous")


complete("adamw8bit_")
