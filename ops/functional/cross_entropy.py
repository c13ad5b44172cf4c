"""Cross entropy of given logits, with gradients: ``headroom::cross_entropy``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.checks import check_choice, check_flags
from .._core.row_ops import FLOAT32, MATRIX, kind, row_op
from .._core.rows import check_tensors, constant_factors, refuse_leaf

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
    check_choice("reduction", reduction, REDUCTIONS)
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
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=0.0 if softcap is None else softcap,
        z_loss=z_loss,
        reduction=how,
        want_argmax=return_argmax,
        in_place=inplace_backward and not torch.compiler.is_compiling(),
    )
    if not (return_lse or return_argmax):
        return loss
    return loss, *((lse,) if return_lse else ()), *((argmax,) if return_argmax else ())


_ROW = kind("rows", dtypes=FLOAT32)
row_op(
    "cross_entropy",
    {
        "logits": MATRIX,
        "target": kind("rows", dtypes=(torch.int64, torch.int32)),
        "weight": kind("cols", dtypes=FLOAT32),
        "loss": kind("", "rows", dtypes=FLOAT32, where="reduction"),
        "lse": _ROW,
        "lse_low": _ROW,
        "argmax": kind("rows", dtypes=(torch.int64,), where="want_argmax"),
        "factors": kind("2", "0", dtypes=FLOAT32, where="reduction"),
    },
)
