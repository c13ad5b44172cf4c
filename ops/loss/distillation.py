"""Divergences between student and teacher from hidden states, without their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.checks import check_choice
from .._core.rows import autocast, check_tensors
from .._core.sizes import format_bytes, parse_bytes
from ..functional.divergence import REDUCTIONS, beta_of, ignored_rows
from ..functional.divergence_chunks import pitch_of
from ..functional.linear_divergence import check
from .inputs import whole_layer

# Rows of a chunk where no workspace is given. Each chunk reads and writes the weight gradient once,
# which takes as long as the products of some 200 rows on a GPU, and of some 10 on a CPU.
CHUNK_ROWS = {"cuda": 1024, "cpu": 256}


def linear_distillation_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    workspace: int | str | None = None,
) -> Tensor:
    """Returns the divergence of the student's distribution over the vocabulary from the teacher's.

    It is :func:`headroom.functional.divergence` of ``linear(student_hidden, student_weight,
    student_bias)`` and of the same of the teacher, computed in chunks of tokens: only the logits
    of one chunk exist, in float32 for every dtype. For "mean" and "sum" the gradients are computed
    in the forward pass, from the logits that are there, and the backward pass multiplies them by
    a number; for "none" it computes the logits again. The gradient of the weight is summed in
    float32.

    Args:
        student_hidden: float32, bfloat16 or float16 ``[..., student_size]``: what enters the head.
        student_weight: ``[classes, student_size]``, of the same dtype. Where it requires no
            gradient, in a frozen head, a third of the student's products is saved.
        teacher_hidden: ``[..., teacher_size]``, with the tokens of the student; the sizes and
            dtypes may differ. The teacher gets no gradient.
        teacher_weight: ``[classes, teacher_size]``, of the dtype of ``teacher_hidden``. The
            number of classes is the student's.
        target, mask, ignore_index: which tokens count, as in
            :func:`headroom.functional.divergence`. On the CPU the others cost no products.
        divergence, beta, temperature: the formula, as there. The loss is not multiplied by
            ``temperature ** 2``.
        reduction: "mean" over the tokens that count (0 if there are none), "batchmean", which is
            the same, "sum", or "none".
        student_bias, teacher_bias: ``[classes]``, of the dtype of the weight.
        workspace: bytes for the logits of a chunk, as a number or as text such as "256 MiB". If
            None, a chunk has 1,024 tokens on CUDA and 256 on the CPU.

    Returns:
        float32, a scalar or ``[...]``.

    Raises:
        ValueError: an option is none of those above, or the workspace is too small for one token.
        RuntimeError: tensors do not fit, vocabularies differ, or ``teacher_hidden`` requires
            grad.

    Under autocast the tensors are cast as ``torch.nn.functional.linear`` casts them. Nobody waits
    for the device, and the work can be captured in a CUDA graph. Weights and biases that are
    DTensors, as FSDP2 makes them, are gathered: see :mod:`headroom.loss.gathered`.
    """
    check_tensors(
        student_hidden=student_hidden,
        student_weight=student_weight,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
    )
    beta = beta_of(divergence, beta)
    check_choice("reduction", reduction, REDUCTIONS)
    if teacher_hidden.requires_grad:
        raise RuntimeError(
            "teacher_hidden requires grad, but the teacher gets no gradient; run it under "
            "torch.no_grad(), or detach its hidden states"
        )
    tensors = autocast(*whole_layer(student_hidden, student_weight, student_bias))
    with torch.no_grad():
        teachers = autocast(*whole_layer(teacher_hidden, teacher_weight, teacher_bias))
    check(*tensors, *(None if t is None else t.detach() for t in teachers))
    ignored = ignored_rows(student_hidden.shape[:-1], target, ignore_index, mask)
    wants = (t is not None and t.requires_grad and torch.is_grad_enabled() for t in tensors)
    rows = _chunk_rows(student_hidden, student_weight.shape[0], workspace)
    return torch.ops.headroom.linear_divergence(
        *tensors,
        *(None if t is None else t.detach() for t in teachers),
        ignored,
        beta,
        temperature,
        0 if reduction == "none" else 1 if reduction != "sum" else 2,
        rows,
        *wants,
    )[0]


def _chunk_rows(hidden: Tensor, classes: int, workspace: int | str | None) -> int:
    """Returns how many tokens a chunk has at most."""
    if workspace is None:
        return CHUNK_ROWS.get(hidden.device.type, CHUNK_ROWS["cpu"])
    row = 2 * 4 * pitch_of(classes)
    most = parse_bytes(workspace, "workspace") // row
    if most < 1:
        raise ValueError(
            f"workspace is {workspace!r}, but the logits of one token, of student and teacher, "
            f"take {format_bytes(row)}"
        )
    return most
