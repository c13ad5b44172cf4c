"""Divergences between distributions of given logits, with gradients: ``headroom::divergence``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.checks import check_choice, check_flags
from .._core.registration import FLOATS
from .._core.row_ops import FLOAT32, MATRIX, kind, row_op
from .._core.rows import check_tensors, refuse_leaf

STATISTICS = 6  # HR_DIVERGENCE_STATISTICS
KINDS = ("forward_kl", "reverse_kl", "js")
REDUCTIONS = ("none", "mean", "batchmean", "sum")


def divergence(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """Returns how far the distribution of each row of student's logits is from the teacher's, or
    the mean or sum of that.

    With ``p = softmax(student / temperature)``, ``q = softmax(teacher / temperature)`` and
    ``m = beta * q + (1 - beta) * p`` the divergence of a row is

    - "forward_kl": ``KL(q || p)``, the sum over the classes of ``q * (log q - log p)``;
    - "reverse_kl": ``KL(p || q)``;
    - "js": ``beta * KL(q || m) + (1 - beta) * KL(p || m)``. ``beta=0`` is the forward and
      ``beta=1`` the reverse divergence, as in trl's ``GKDTrainer`` and Liger's losses.

    It is not multiplied by ``temperature ** 2``, as it is not there; Hinton's distillation does.
    Computed in float32 for every dtype of logits. Keeps the logits of both and 24 bytes per row for
    the backward pass. Rows that are ignored are not read.

    Args:
        student: float32, bfloat16 or float16 ``[..., classes]``, of any strides. Minus infinity
            masks a class.
        teacher: of the same shape and dtype. It gets no gradient.
        target: ``[...]``, integers: rows where it is ``ignore_index`` count for nothing. Its other
            numbers have no meaning here.
        divergence: the formula, of those above.
        beta: the share of the teacher in the mixture of "js": 0, 1, or from 1e-6 to 1 - 1e-6.
        temperature: from 1e-6 to 1e6.
        mask: bool ``[...]``, True for rows that count; given instead of ``target``.
        ignore_index: see ``target``.
        reduction: "none" gives the divergence of each row, "sum" their sum, and "mean" divides it
            by the number of rows that count; it is 0 if there is none. "batchmean", the name that
            :func:`torch.nn.functional.kl_div` and trl have for it, is the same.
        inplace_backward: writes the gradient over the student's logits instead of allocating it.
            Backward can then run once, and nothing else may need the logits after it. They must not
            be a leaf. Under ``torch.compile`` the gradient is allocated.

    Returns:
        float32, a scalar or ``[...]``.

    Raises:
        ValueError: ``divergence`` or ``reduction`` is none of those above, ``target`` and ``mask``
            are both given, or ``inplace_backward`` is asked of a leaf.
        TypeError: ``ignore_index`` is no integer.
        RuntimeError: another argument does not fit, or the teacher requires grad.

    The formula and its sources are documented at ``hr_divergence_forward`` in ``headroom.h``.
    """
    check_tensors(student=student, teacher=teacher)
    check_flags(inplace_backward=inplace_backward)
    beta = beta_of(divergence, beta)
    check_choice("reduction", reduction, REDUCTIONS)
    if teacher.requires_grad:
        raise RuntimeError(
            "teacher requires grad, but gets no gradient; compute it under torch.no_grad(), or "
            "detach it"
        )
    if inplace_backward:
        refuse_leaf(student, "student")
    if student.shape != teacher.shape:
        raise RuntimeError(
            f"student is {[*student.shape]}, but teacher is {[*teacher.shape]}: both need the same "
            "rows and the same classes; where a vocabulary is padded, cut both to the shorter"
        )
    ignored = ignored_rows(student.shape[:-1], target, ignore_index, mask)
    rows, _ = torch.ops.headroom.divergence(
        student,
        teacher,
        ignored,
        beta,
        temperature,
        inplace_backward and not torch.compiler.is_compiling(),
    )
    return reduced(rows, ignored, reduction)


def beta_of(divergence: str, beta: float) -> float:
    """Returns the ``beta`` of the generalized divergence that a name stands for."""
    check_choice("divergence", divergence, KINDS)
    return {"forward_kl": 0.0, "reverse_kl": 1.0}.get(divergence, beta)


def ignored_rows(
    shape: torch.Size, target: Tensor | None, ignore_index: int, mask: Tensor | None
) -> Tensor | None:
    """Returns a bool tensor of the rows that count for nothing, or None if all count."""
    if target is not None and mask is not None:
        raise ValueError("target and mask are both given; give the one that says which rows count")
    given, name = (target, "target") if mask is None else (mask, "mask")
    if given is None:
        return None
    if given.shape != shape:
        raise RuntimeError(
            f"{name} is {[*given.shape]}, wanted {[*shape]}, the shape of the student without the "
            "last dimension"
        )
    if mask is not None:
        if mask.dtype != torch.bool:
            raise RuntimeError(
                f"mask has dtype {mask.dtype}, wanted bool: True for rows that count"
            )
        return ~mask
    if given.is_floating_point() or given.dtype == torch.bool:
        raise RuntimeError(f"target has dtype {given.dtype}, wanted integers; give masks as mask=")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index is {ignore_index!r}, wanted an integer; use mask= instead")
    return given == ignore_index


def reduced(rows: Tensor, ignored: Tensor | None, reduction: str) -> Tensor:
    """Returns the divergences of rows, those that are ignored being 0, as ``reduction`` wants them.
    Nobody waits for the number of rows that count."""
    if reduction == "none":
        return rows
    total = rows.sum(dtype=torch.float64)
    if reduction != "sum":
        total = total / rows_that_count(rows, ignored)
    return total.float()


def rows_that_count(rows: Tensor, ignored: Tensor | None) -> Tensor | int:
    """Returns their number, and 1 for none, so that a mean of nothing is 0."""
    if ignored is None:
        return max(rows.numel(), 1)
    return (rows.numel() - ignored.sum()).clamp_min(1)


row_op(
    "divergence",
    {
        "student": MATRIX,
        "teacher": MATRIX,
        "ignored": kind("rows", dtypes=(torch.bool,)),
        "loss": kind("rows", dtypes=FLOAT32),
        "dloss": kind("rows", "", dtypes=FLOAT32),
        "statistics": kind(f"count {STATISTICS}", dtypes=FLOAT32),
        "grad": kind("rows cols", dtypes=FLOATS),
    },
)
