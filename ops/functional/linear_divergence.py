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

from .._core.registration import FLOATS, refuse_derivative, require
from .._core.row_ops import FLOAT32, MATRIX, Gradient, kind, row_op
from .divergence import reduced, rows_that_count
from .divergence_chunks import Head, counting_rows, gain_of, over_chunks
from .kept_gradients import KeptGradient

HEADS = (
    "Tensor student_hidden, Tensor student_weight, Tensor? student_bias, Tensor teacher_hidden, "
    "Tensor teacher_weight, Tensor? teacher_bias, Tensor? ignored"
)
OPTIONS = "float beta, float temperature"
WANTS = (
    "int chunk_rows, bool want_dstudent_hidden, bool want_dstudent_weight, bool want_dstudent_bias"
)
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
    "(Tensor dstudent_hidden, Tensor dstudent_weight, Tensor dstudent_bias)"
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
    student_grads = (grads.hidden, grads.weight, grads.bias)
    return (
        loss,
        count,
        *(
            rows.new_empty(0) if one is None else one.view(like.shape)
            for one, like in zip(student_grads, heads[:3])
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
    student_grads = (grads.hidden, grads.weight, grads.bias)
    return tuple(
        dloss.new_empty(0) if one is None else one.to(like.dtype).view(like.shape)
        for one, like in zip(student_grads, heads[:3])
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
    return tuple(_scaled(grad, factor, dtype) for grad in (hidden, weight, bias))


def _scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``grad * factor``, rounded once, without a second float32 tensor of that size."""
    if grad.dtype == dtype == torch.float32:
        return grad * factor
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    if grad.numel():
        for part, to in zip(grad.split(4096), out.split(4096)):
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


_HEADS = [
    f"{who}_{part}" for who in ("student", "teacher") for part in ("hidden", "weight", "bias")
]
_WANTS = [f"want_d{name}" for name in _HEADS[:3]]


def _check(**given: Any) -> None:
    check(*(given[name] for name in _HEADS))


def _results(student_hidden, student_weight, student_bias, reduction, **given):
    def of(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return student_hidden.new_empty(shape, dtype=dtype)

    has_grads, (w1, w2, w3) = bool(reduction), (given[name] for name in _WANTS)
    dtype = Head(student_hidden, student_weight, None).kept_dtype
    return (
        of(() if has_grads else student_hidden.shape[:-1]),
        of(() if has_grads else (0,)),
        of(student_hidden.shape, dtype) if has_grads and w1 else of((0,)),
        of(student_weight.shape) if has_grads and w2 else of((0,)),
        of(student_bias.shape) if has_grads and w3 else of((0,)),
    )


def _gradients(dloss, **given):
    return tuple(
        given[name].new_empty(given[name].shape) if given[want] else dloss.new_empty(0)
        for name, want in zip(_HEADS, _WANTS)
    )


def _fake_scale(dloss, count, hidden, weight, bias, dtype):
    for name, one in {"dloss": dloss, "count": count}.items():
        require(one.dtype == torch.float32, f"{name} is {one.dtype}, wanted float32")
    return tuple(one.new_empty(one.shape, dtype=dtype) for one in (hidden, weight, bias))


# ---- Gradients and FLOPs ---------------------------------------------------------------------


def _gradient(derived: Gradient) -> KeptGradient:
    """Makes the gradient keep gradients that are there, instead of hidden states and weights."""
    return KeptGradient(
        derived,
        inputs=tuple(_HEADS[:3]),
        kept=("count", "hidden", "weight", "bias"),
        is_done=lambda given, needs: bool(given["reduction"]),
        scaled=lambda dtype: partial(torch.ops.headroom.linear_divergence_scale, dtype=dtype),
    )


def _logits(student_hidden, student_weight, teacher_hidden, **_) -> int:
    """Returns the work of the logits of both, which the backward pass computes again."""
    features = student_hidden[-1] + teacher_hidden[-1]
    return 2 * math.prod(student_hidden[:-1]) * student_weight[0] * features


def _backward_flops(student_hidden, student_weight, **given) -> int:
    products = given[_WANTS[0]] + given[_WANTS[1]]
    gradients = 2 * math.prod(student_hidden) * student_weight[0] * products
    return _logits(student_hidden, student_weight, given["teacher_hidden"]) + gradients


row_op(
    "linear_divergence",
    {
        "student_hidden": MATRIX,
        "teacher_hidden": kind("rows teacher", dtypes=FLOATS),
        "ignored": kind("rows", dtypes=(torch.bool,)),
        "dloss": kind("rows", "", dtypes=FLOAT32),
    },
    check=_check,
    results=_results,
    gradients=_gradients,
    gradient=_gradient,
    flops=lambda reduction, **given: (_backward_flops if reduction else _logits)(**given),
    backward_flops=_backward_flops,
    again=_logits,
)
refuse_derivative("linear_divergence_scale", fake=_fake_scale)
