"""The op ``headroom::linear_divergence``, of distillation from hidden states: fakes and gradients.

Users call :func:`headroom.linear_distillation_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._core.registration import FLOATS, differentiable, refuse_derivative, require
from .divergence import reduced, rows_that_count
from .divergence_chunks import Head, counting_rows, gain_of, over_chunks
from .kept_gradients import origins_of, without_derivative

__all__ = ["backward_of", "check", "forward_of", "scale_of"]

HEADS = (
    "Tensor student_hidden, Tensor student_weight, Tensor? student_bias, Tensor teacher_hidden, "
    "Tensor teacher_weight, Tensor? teacher_bias, Tensor? ignored"
)
OPTIONS = "float beta, float temperature"
WANTS = "int chunk_rows, bool want_hidden, bool want_weight, bool want_bias"
_library = torch.library.Library("headroom", "FRAGMENT")
# Gradients are of the sum times a gain, in float32 for float16, and those that are not wanted have
# no elements, because a schema has no optional results. `count` is what divides them: the gain,
# times what a mean divides the sum by.
_library.define(
    f"linear_divergence({HEADS}, {OPTIONS}, int reduction, {WANTS}) -> "
    "(Tensor loss, Tensor count, Tensor hidden, Tensor weight, Tensor bias)"
)
# Of a mean or a sum, from the gradients that are there.
_library.define(
    "linear_divergence_scale(Tensor dloss, Tensor count, Tensor hidden, Tensor weight, "
    "Tensor bias, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)
# Of the losses of tokens.
_library.define(
    f"linear_divergence_backward(Tensor dloss, {HEADS}, {OPTIONS}, {WANTS}) -> "
    "(Tensor, Tensor, Tensor)"
)


def forward_of(
    *arguments: Any, find: Callable[[Tensor], Tensor] = counting_rows
) -> tuple[Tensor, ...]:
    """Computes ``headroom::linear_divergence``. ``find`` is for plans, which do not know the values
    of ``ignored``: see :func:`over_chunks`."""
    *heads, ignored, beta, temperature, reduction, chunk_rows, w1, w2, w3 = arguments
    student, teacher = Head(*heads[:3]), Head(*heads[3:])
    wants = (w1, w2, w3) if reduction else (False, False, False)
    rows, grads = over_chunks(
        student, teacher, ignored, None, (beta, temperature), chunk_rows, wants, find
    )
    loss, count = rows.view(heads[0].shape[:-1]), rows.new_empty(0)
    if reduction:
        counted = rows_that_count(rows, ignored) if reduction == 1 else 1
        gain = gain_of(heads[0].dtype, temperature)
        count = torch.as_tensor(counted, device=rows.device).float() * gain
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


def backward_of(
    dloss: Tensor, *arguments: Any, find: Callable[[Tensor], Tensor] = counting_rows
) -> tuple[Tensor, ...]:
    """Computes ``headroom::linear_divergence_backward``; ``find`` is as in :func:`forward_of`."""
    *heads, ignored, beta, temperature, chunk_rows, w1, w2, w3 = arguments
    student, teacher = Head(*heads[:3]), Head(*heads[3:])
    numbers, wants = (beta, temperature), (w1, w2, w3)
    _, grads = over_chunks(student, teacher, ignored, dloss, numbers, chunk_rows, wants, find)
    kept = (grads.hidden, grads.weight, grads.bias)
    return tuple(
        dloss.new_empty(0) if one is None else one.to(like.dtype).view(like.shape)
        for one, like in zip(kept, heads[:3])
    )


def scale_of(
    dloss: Tensor,
    count: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Computes ``headroom::linear_divergence_scale``."""
    factor = dloss / count
    return tuple(_scaled(kept, factor, dtype) for kept in (hidden, weight, bias))


def _scaled(kept: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``kept * factor``, rounded once, without a second float32 tensor of that size."""
    if kept.dtype == dtype == torch.float32:
        return kept * factor
    out = torch.empty(kept.shape, dtype=dtype, device=kept.device)
    if kept.numel():
        for part, to in zip(kept.split(4096), out.split(4096)):
            to.copy_(part.float() * factor)
    return out


for _device in ("CPU", "CUDA"):
    _library.impl("linear_divergence", forward_of, _device)
    _library.impl("linear_divergence_backward", backward_of, _device)
    _library.impl("linear_divergence_scale", scale_of, _device)


# ---- Fakes: checks, and the shapes and dtypes of the results ---------------------------------


def check(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias) -> None:
    """Raises what does not fit of the heads of student and teacher."""
    groups = {
        "student": (hidden, weight, bias),
        "teacher": (teacher_hidden, teacher_weight, teacher_bias),
    }
    for who, (h, w, b) in groups.items():
        require(h.dtype in FLOATS, f"{who}_hidden has dtype {h.dtype}, wanted one of {FLOATS}")
        require(h.dim() > 0, f"{who}_hidden has no dimensions, wanted [..., {who}_size]")
        require(
            w.dim() == 2 and w.shape[1] == h.shape[-1],
            f"{who}_weight is {[*w.shape]}, wanted [classes, {h.shape[-1]}], for {who}_hidden",
        )
        require(
            w.numel() > 0, f"{who}_weight is {[*w.shape]}, wanted a class and a size of 1 or more"
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
    check(*heads)
    hidden, weight, bias = heads[:3]

    def of(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return hidden.new_empty(shape, dtype=dtype)

    kept = bool(reduction)
    return (
        of(() if kept else hidden.shape[:-1]),
        of(() if kept else (0,)),
        of(hidden.shape, Head(hidden, weight, None).kept_dtype) if kept and w1 else of((0,)),
        of(weight.shape) if kept and w2 else of((0,)),
        of(bias.shape) if kept and w3 else of((0,)),
    )


def _fake_backward(dloss: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    check(*arguments[:6])
    require(dloss.dtype == torch.float32, f"dloss is {dloss.dtype}, wanted float32")
    return tuple(
        like.new_empty(like.shape) if is_wanted else dloss.new_empty(0)
        for like, is_wanted in zip(arguments[:3], arguments[-3:])
    )


def _fake_scale(dloss: Tensor, count: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *kept, dtype = rest
    for name, one in {"dloss": dloss, "count": count}.items():
        require(one.dtype == torch.float32, f"{name} is {one.dtype}, wanted float32")
    return tuple(one.new_empty(one.shape, dtype=dtype) for one in kept)


# ---- Gradients -------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *_, beta, temperature, ctx.is_done, chunk_rows, _, _, _ = inputs
    ctx.numbers, ctx.dtype = (beta, temperature, chunk_rows), inputs[0].dtype
    # Of gradients that are there, neither the hidden states nor the weights are needed again.
    ctx.save_for_backward(*(output[1:] if ctx.is_done else inputs[:7]))
    ctx.origins = origins_of(inputs[:3], ctx.needs_input_grad) if ctx.is_done else []
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple:
    none = (None,) * 14
    if dloss is None:
        return none
    wants, ops = ctx.needs_input_grad[:3], torch.ops.headroom
    if ctx.is_done:
        scaled = partial(ops.linear_divergence_scale, dtype=ctx.dtype)
        tensors = dloss, *ctx.saved_tensors
        grads = without_derivative("linear_divergence_backward", scaled, tensors, ctx.origins)
    else:
        grads = ops.linear_divergence_backward(dloss, *ctx.saved_tensors, *ctx.numbers, *wants)
    return (*(grad if wanted else None for grad, wanted in zip(grads, wants)), *none[3:])


def _flops(s_shape, w_shape, b_shape, t_shape, t_w_shape, *rest, **_) -> int:
    *_, reduction, _, want_hidden, want_weight, _ = rest
    tokens, classes = math.prod(s_shape[:-1]), w_shape[0]
    gradients = (want_hidden + want_weight) if reduction else 0
    return 2 * tokens * classes * (s_shape[-1] * (1 + gradients) + t_shape[-1])


def _backward_flops(dloss_shape, s_shape, w_shape, b_shape, t_shape, *rest, **_) -> int:
    *_, want_hidden, want_weight, _ = rest
    tokens, classes = math.prod(s_shape[:-1]), w_shape[0]
    return 2 * tokens * classes * (s_shape[-1] * (1 + want_hidden + want_weight) + t_shape[-1])


differentiable(
    "linear_divergence",
    fake=_fake_forward,
    setup_context=_setup,
    backward=_backward,
    flops=_flops,
)
refuse_derivative("linear_divergence_backward", fake=_fake_backward, flops=_backward_flops)
refuse_derivative("linear_divergence_scale", fake=_fake_scale)
