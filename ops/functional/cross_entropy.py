"""Cross entropy of given logits, with gradients: ``headroom::cross_entropy``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_flags
from .._core.registration import (
    FLOATS,
    complete,
    differentiable,
    refuse_derivative,
    register_fake,
    require,
)
from .._core.rows import check_tensors, constant_factors
from .over_logits import check_float32, logits_gradient, refuse_leaf

__all__ = ["cross_entropy"]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
MEAN_OR_ZERO = 3


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    empty: str = "nan",
) -> Tensor | tuple[Tensor, ...]:
    """Returns the cross entropy of each row of logits with its target, or the mean or sum of them.

    Arguments and results are those of :func:`torch.nn.functional.cross_entropy` for targets that
    are classes, but the classes are always the last dimension, and the loss is float32 for every
    dtype of logits: it is computed in float32 and not rounded to 16 bits. Keeps the logits and
    eight bytes per row for the backward pass. Rows that are ignored are not read.

    Args:
        logits: float32, bfloat16 or float16 ``[..., classes]``, of any strides. Minus infinity
            masks a class.
        target: int64 or int32 ``[...]``: a class from 0 to ``classes - 1``, or ``ignore_index``.
        weight: ``[classes]``, a factor for each class, or None. It gets no gradient.
        ignore_index: rows with this target count for nothing.
        reduction: "mean" divides the sum by the sum of the weights of the rows that count, "sum"
            does not, and "none" gives the loss of each row.
        label_smoothing: the share of the target, from 0 to 1, that all classes get.
        softcap: if given, each logit ``z`` counts as ``softcap * tanh(z / softcap)``.
        z_loss: if given, ``z_loss * lse ** 2`` is added to the loss of a row, with ``lse`` the
            logarithm of the sum of exponentials. "mean" divides it by the number of rows that
            count.
        inplace_backward: writes the gradient over the logits instead of allocating it. Backward
            can then run once, and nothing else may need the logits after it. The logits must not
            be a leaf. Under ``torch.compile`` the gradient is allocated.
        return_lse: also returns the log-sum-exp of each row, float32, without a gradient; 0 for
            rows that are ignored.
        return_argmax: also returns the first class with the largest logit of each row, int64; -1
            for rows that are ignored.
        empty: the mean if the weights of the rows that count add up to 0, as they do if no row
            counts: "nan", as in torch, or "zero". Gradients of it are zero.

    Returns:
        The loss, float32, or a tuple of it and what else was asked for, in the order of the
        arguments.

    Raises:
        ValueError: ``reduction`` or ``empty`` is none of those above, or ``inplace_backward`` is
            asked of a leaf.
        RuntimeError: another argument does not fit. On the CPU also if a target is no class; on
            CUDA, where nobody waits for the targets, the loss is then NaN.

    The formula and its sources are documented at ``hr_cross_entropy_forward`` in ``headroom.h``.
    """
    check_tensors(logits=logits, target=target)
    check_flags(
        inplace_backward=inplace_backward, return_lse=return_lse, return_argmax=return_argmax
    )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, wanted one of {', '.join(REDUCTIONS)}")
    if empty not in ("nan", "zero"):
        raise ValueError(f"empty is {empty!r}, wanted nan or zero")
    if target.is_floating_point():
        raise RuntimeError(
            f"target has dtype {target.dtype}: probabilities of classes are not supported, use "
            "torch.nn.functional.cross_entropy"
        )
    if inplace_backward:
        refuse_leaf(logits, "logits")
    weight = constant_factors(weight, "weight")
    how = MEAN_OR_ZERO if reduction == "mean" and empty == "zero" else REDUCTIONS[reduction]
    loss, lse, _, argmax, _ = torch.ops.headroom.cross_entropy(
        logits,
        target,
        weight,
        ignore_index,
        how,
        label_smoothing,
        0.0 if softcap is None else softcap,
        z_loss,
        return_argmax,
        inplace_backward and not torch.compiler.is_compiling(),
    )
    if not (return_lse or return_argmax):
        return loss
    return loss, *((lse,) if return_lse else ()), *((argmax,) if return_argmax else ())


# ---- Fakes: the shapes and dtypes of the results ---------------------------------------------


def _check(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    require(logits.dim() > 0, "logits has no dimensions, wanted [..., cols]")
    require(logits.dtype in FLOATS, f"logits has dtype {logits.dtype}, wanted one of {FLOATS}")
    require(
        target.dtype in (torch.int64, torch.int32),
        f"target has dtype {target.dtype}, wanted int64 or int32: the number of a class per row",
    )
    require(
        target.shape == logits.shape[:-1],
        "target must have the shape of logits without the last dimension, which is that of the "
        "classes; move it there with logits.movedim(1, -1)",
    )
    if weight is not None:
        require(
            weight.numel() == logits.shape[-1] and weight.dtype == torch.float32,
            f"weight must be a float32 tensor of {logits.shape[-1]} elements",
        )


def _fake_cross_entropy(
    logits, target, weight, ignore_index, reduction, smoothing, softcap, z_loss, argmax, in_place
):
    _check(logits, target, weight)
    rows = logits.shape[:-1]

    def of(shape, dtype=torch.float32):
        return logits.new_empty(shape, dtype=dtype)

    return (
        of(rows if reduction == 0 else ()),
        of(rows),
        of(rows),
        of(rows if argmax else (0,), torch.int64),
        of((0 if reduction == 0 else 2,)),
    )


def _check_backward(dloss, logits, target, weight, lse, lse_low, factors, *_) -> None:
    _check(logits, target, weight)
    check_float32(dloss=dloss, lse=lse, lse_low=lse_low, factors=factors)


def _fake_backward(*arguments):
    _check_backward(*arguments)
    logits = arguments[1]
    return logits.new_empty(logits.shape)


def _fake_backward_in_place(*arguments):
    _check_backward(*arguments)


# ---- Gradients -------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    logits, target, weight, ctx.ignore_index, _, *numbers, _, ctx.in_place = inputs
    ctx.numbers = numbers
    _, lse, lse_low, argmax, factors = output
    ctx.save_for_backward(logits, target, weight, lse, lse_low, factors)
    ctx.mark_non_differentiable(lse, lse_low, argmax, factors)
    ctx.set_materialize_grads(False)
    ctx.is_spent = False


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple:
    grad = logits_gradient(
        ctx, dloss, "cross_entropy", ctx.ignore_index, *ctx.numbers, takes_grad=False
    )
    return (grad, *(None,) * 9)


differentiable("cross_entropy", fake=_fake_cross_entropy, setup_context=_setup, backward=_backward)
refuse_derivative("cross_entropy_backward", fake=_fake_backward)
register_fake("cross_entropy_backward_", _fake_backward_in_place)
complete("cross_entropy_backward_")
