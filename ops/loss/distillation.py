"""Divergences between student and teacher from hidden states: ``headroom::linear_divergence``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.registration import FLOATS, differentiable, refuse_derivative, require
from .._core.rows import autocast_dtype
from ..functional.divergence import (
    REDUCTIONS,
    beta_of,
    ignored_rows,
    reduced,
    rows_that_count,
)
from ..functional.gemm import gemm_into

__all__ = ["linear_distillation_loss"]

# Rows of a chunk where no workspace is given. Each chunk reads and writes the weight gradient once,
# which takes as long as the products of some 200 rows on a GPU, and of some 10 on a CPU.
CHUNK_ROWS = {"cuda": 1024, "cpu": 256}
PITCH = 8  # elements to which rows of logits are padded, so that each begins at 16 bytes


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
    for the device, and the work can be captured in a CUDA graph. The weights must be whole: gather
    the shards of sharded ones first.
    """
    beta = beta_of(divergence, beta)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, wanted one of {', '.join(REDUCTIONS)}")
    if teacher_hidden.requires_grad:
        raise RuntimeError(
            "teacher_hidden requires grad, but the teacher gets no gradient; run it under "
            "torch.no_grad(), or detach its hidden states"
        )
    tensors = student_hidden, student_weight, student_bias
    teachers = teacher_hidden, teacher_weight, teacher_bias
    lowered = autocast_dtype(student_hidden.device.type)
    if lowered is not None:
        tensors, teachers = (
            tuple(t.to(lowered) if t is not None and t.dtype in FLOATS else t for t in group)
            for group in (tensors, teachers)
        )
    _check(*tensors, *(None if t is None else t.detach() for t in teachers))
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


def _pitch(classes: int) -> int:
    return (classes + PITCH - 1) // PITCH * PITCH


def _chunk_rows(hidden: Tensor, classes: int, workspace: int | str | None) -> int:
    """How many tokens a chunk has: as many in each, as far as that goes."""
    if workspace is None:
        most = CHUNK_ROWS.get(hidden.device.type, CHUNK_ROWS["cpu"])
    else:
        from .._core.sizes import format_bytes, parse_bytes

        row = 2 * 4 * _pitch(classes)
        most = parse_bytes(workspace) // row
        if most < 1:
            raise ValueError(
                f"workspace is {workspace!r}, but the logits of one token, of student and teacher, "
                f"take {format_bytes(row)}"
            )
    rows = max(hidden.shape[:-1].numel(), 1)
    return math.ceil(rows / math.ceil(rows / most))


# ---- One pass over the chunks ----------------------------------------------------------------


@dataclass
class _Head:
    """What logits come from: hidden states as a matrix, weight and bias."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def __post_init__(self) -> None:
        self.hidden = self.hidden.flatten(0, -2)
        if self.bias is not None:
            self.bias = self.bias.float()

    def take(self, index: Tensor) -> None:
        self.hidden = self.hidden.index_select(0, index)

    def logits(self, out: Tensor, begin: int, end: int) -> Tensor:
        z = out[: end - begin]
        gemm_into(z, self.hidden[begin:end], self.weight, transpose_b=True, bias=self.bias)
        return z


@dataclass
class _Gradients:
    """Of the student: of the hidden states, and sums over the chunks in float32."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, head: _Head, wants: tuple[bool, bool, bool]) -> _Gradients:
        classes = head.weight.shape[0]
        float32 = {"dtype": torch.float32, "device": head.weight.device}
        return cls(
            head.hidden.new_zeros(head.hidden.shape) if wants[0] else None,
            torch.zeros(head.weight.shape, **float32) if wants[1] else None,
            torch.zeros(classes, **float32) if wants[2] else None,
        )

    def add(self, head: _Head, dlogits: Tensor, begin: int, end: int) -> None:
        if self.hidden is not None:
            gemm_into(self.hidden[begin:end], dlogits, head.weight)
        if self.weight is not None:
            chunk = head.hidden[begin:end]
            gemm_into(self.weight, dlogits, chunk, transpose_a=True, beta=1.0)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=torch.float32)


@torch.no_grad()
def _over_chunks(
    student: _Head,
    teacher: _Head,
    ignored: Tensor | None,
    dloss: Tensor | None,
    numbers: tuple[float, float],
    chunk_rows: int,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor, _Gradients]:
    """Returns the divergence of each token, and gradients: of the sum, or of the tokens times
    ``dloss``."""
    rows, classes = len(student.hidden), student.weight.shape[0]
    ops, dtype, device = torch.ops.headroom, student.hidden.dtype, student.hidden.device
    counting = None
    if ignored is not None and device.type == "cpu":  # on CUDA, one would have to wait for it
        counting = ignored.flatten().logical_not().nonzero().flatten()
        student.take(counting)
        teacher.take(counting)
        ignored, dloss = None, None if dloss is None else dloss.flatten()[counting]
    count = len(student.hidden)
    losses = torch.zeros(count, device=device)
    grads = _Gradients.of(student, wants)
    if dloss is None:
        dloss = torch.ones((), device=device)
    buffers = [
        torch.empty(min(chunk_rows, count), _pitch(classes), device=device) for _ in range(2)
    ]
    for begin in range(0, count, chunk_rows):
        end = min(begin + chunk_rows, count)
        z, other = (
            head.logits(buffer[:, :classes], begin, end)
            for head, buffer in zip((student, teacher), buffers)
        )
        chunk_ignored = None if ignored is None else ignored.flatten()[begin:end]
        losses[begin:end], statistics = ops.divergence(z, other, chunk_ignored, *numbers, False)
        if any(wants):
            # The gradient lies over the logits, in the narrower type of the products.
            dlogits = buffers[0].view(dtype)[: end - begin, :classes]
            chunk_dloss = dloss if dloss.dim() == 0 else dloss.flatten()[begin:end]
            ops.divergence_backward_(
                chunk_dloss, z, other, chunk_ignored, statistics, *numbers, dlogits
            )
            grads.add(student, dlogits, begin, end)
    if counting is not None:
        losses = losses.new_zeros(rows).index_copy_(0, counting, losses)
        if grads.hidden is not None:
            whole = grads.hidden.new_zeros(rows, grads.hidden.shape[1])
            grads.hidden = whole.index_copy_(0, counting, grads.hidden)
    return losses, grads


def _scaled(kept: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``kept * factor``, rounded once, without a second float32 tensor of that size."""
    if kept.dtype == dtype == torch.float32:
        return kept * factor
    out = torch.empty(kept.shape, dtype=dtype, device=kept.device)
    for part, to in zip(kept.split(4096), out.split(4096)):
        to.copy_(part.float() * factor)
    return out


# ---- The ops ---------------------------------------------------------------------------------

HEADS = (
    "Tensor student_hidden, Tensor student_weight, Tensor? student_bias, Tensor teacher_hidden, "
    "Tensor teacher_weight, Tensor? teacher_bias, Tensor? ignored"
)
OPTIONS = (
    "float beta, float temperature, int reduction, int chunk_rows, bool want_hidden, "
    "bool want_weight, bool want_bias"
)
_library = torch.library.Library("headroom", "FRAGMENT")
# Gradients are of the sum, and those that are not wanted have no elements, because a schema has no
# optional results. `count` is what a mean divides the sum by.
_library.define(
    f"linear_divergence({HEADS}, {OPTIONS}) -> "
    "(Tensor loss, Tensor count, Tensor hidden, Tensor weight, Tensor bias)"
)
_library.define(
    f"linear_divergence_backward(Tensor dloss, {HEADS}, Tensor count, Tensor kept_hidden, "
    f"Tensor kept_weight, Tensor kept_bias, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *heads, ignored, beta, temperature, reduction, chunk_rows, w1, w2, w3 = arguments
    student, teacher = _Head(*heads[:3]), _Head(*heads[3:])
    wants = (w1, w2, w3) if reduction else (False, False, False)
    rows, grads = _over_chunks(
        student, teacher, ignored, None, (beta, temperature), chunk_rows, wants
    )
    shape = heads[0].shape
    loss, count = rows.view(shape[:-1]), rows.new_empty(0)
    if reduction:
        count = torch.as_tensor(
            rows_that_count(rows, ignored) if reduction == 1 else 1, device=rows.device
        ).float()
        loss = reduced(rows, ignored, "mean" if reduction == 1 else "sum")
    kept = (grads.hidden, grads.weight, grads.bias)
    return (
        loss,
        count,
        *(
            rows.new_empty(0) if one is None else one.view(like.shape)
            for one, like in zip(kept, heads[:3])
        ),
    )


def _backward_op(dloss: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    heads, ignored = arguments[:6], arguments[6]
    count, *kept = arguments[7:11]
    beta, temperature, reduction, chunk_rows, *wants = arguments[11:]
    if reduction:
        factor = dloss / count
    else:
        _, grads = _over_chunks(
            _Head(*heads[:3]),
            _Head(*heads[3:]),
            ignored,
            dloss,
            (beta, temperature),
            chunk_rows,
            tuple(wants),
        )
        kept = [grads.hidden, grads.weight, grads.bias]
        factor = torch.ones((), device=dloss.device)
    return tuple(
        dloss.new_empty(0)
        if one is None or not wanted
        else _scaled(one, factor, like.dtype).view(like.shape)
        for one, like, wanted in zip(kept, heads[:3], wants)
    )


for _device in ("CPU", "CUDA"):
    _library.impl("linear_divergence", _forward, _device)
    _library.impl("linear_divergence_backward", _backward_op, _device)


# ---- Fakes: checks, and the shapes and dtypes of the results ---------------------------------


def _check(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias) -> None:
    groups = {
        "student": (hidden, weight, bias),
        "teacher": (teacher_hidden, teacher_weight, teacher_bias),
    }
    for who, (h, w, b) in groups.items():
        require(h.dtype in FLOATS, f"{who}_hidden has dtype {h.dtype}, wanted one of {FLOATS}")
        require(h.dim() > 1, f"{who}_hidden is {[*h.shape]}, wanted [..., {who}_size]")
        require(
            w.dim() == 2 and w.shape[1] == h.shape[-1] and w.numel() > 0,
            f"{who}_weight is {[*w.shape]}, wanted [classes, {h.shape[-1]}], for {who}_hidden",
        )
        require(
            b is None or b.shape == w.shape[:1],
            f"{who}_bias is {None if b is None else [*b.shape]}, wanted [{w.shape[0]}]",
        )
        for name, tensor in (("weight", w), ("bias", b)):
            require(
                tensor is None or (tensor.dtype == h.dtype and tensor.device == hidden.device),
                f"{who}_{name} is {getattr(tensor, 'dtype', None)} on "
                f"{getattr(tensor, 'device', None)}, wanted {h.dtype} on {hidden.device}",
            )
    require(
        teacher_hidden.shape[:-1] == hidden.shape[:-1],
        f"teacher_hidden is {[*teacher_hidden.shape]}, but student_hidden is {[*hidden.shape]}: "
        "the tokens must be the same",
    )
    require(
        teacher_hidden.device == hidden.device,
        f"teacher_hidden is on {teacher_hidden.device}, but student_hidden is on {hidden.device}",
    )
    require(
        teacher_weight.shape[0] == weight.shape[0],
        f"the teacher has {teacher_weight.shape[0]} classes, but the student {weight.shape[0]}: "
        "both need the same vocabulary; where one is padded, cut its weight and bias, "
        "teacher_weight[:classes]",
    )


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *heads, ignored, beta, temperature, reduction, chunk_rows, w1, w2, w3 = arguments
    _check(*heads)
    hidden, weight, bias = heads[:3]

    def of(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return hidden.new_empty(shape, dtype=dtype)

    kept = bool(reduction)
    return (
        of(() if kept else hidden.shape[:-1]),
        of(() if kept else (0,)),
        of(hidden.shape, hidden.dtype) if kept and w1 else of((0,)),
        of(weight.shape) if kept and w2 else of((0,)),
        of(bias.shape) if kept and w3 else of((0,)),
    )


def _fake_backward(dloss: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _check(*arguments[:6])
    require(dloss.dtype == torch.float32, f"dloss is {dloss.dtype}, wanted float32")
    return tuple(
        like.new_empty(like.shape) if wanted else dloss.new_empty(0)
        for like, wanted in zip(arguments[:3], arguments[-3:])
    )


# ---- Gradients -------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.options = inputs[7:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple:
    none = (None,) * 14
    if dloss is None:
        return none
    *options, _, _, _ = ctx.options
    wants = ctx.needs_input_grad[:3]
    grads = torch.ops.headroom.linear_divergence_backward(
        dloss, *ctx.saved_tensors, *options, *wants
    )
    return (*(g if wanted else None for g, wanted in zip(grads, wants)), *none[3:])


def _flops(s_shape, w_shape, b_shape, t_shape, t_w_shape, *rest, **_) -> int:
    *_, reduction, _, want_hidden, want_weight, _ = rest
    tokens, classes = math.prod(s_shape[:-1]), w_shape[0]
    gradients = (want_hidden + want_weight) if reduction else 0
    return 2 * tokens * classes * (s_shape[-1] * (1 + gradients) + t_shape[-1])


def _backward_flops(dloss_shape, s_shape, w_shape, b_shape, t_shape, *rest, **_) -> int:
    *_, reduction, chunk_rows, want_hidden, want_weight, _ = rest
    tokens, classes = math.prod(s_shape[:-1]), w_shape[0]
    if reduction:
        return 0
    return 2 * tokens * classes * (s_shape[-1] * (1 + want_hidden + want_weight) + t_shape[-1])


differentiable(
    "linear_divergence",
    fake=_fake_forward,
    setup_context=_setup,
    backward=_backward,
    flops=_flops,
)
refuse_derivative("linear_divergence_backward", fake=_fake_backward, flops=_backward_flops)
