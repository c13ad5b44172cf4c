"""The op ``headroom::linear_cross_entropy`` and its backward ops: fakes, gradients and FLOPs.

Users call :func:`headroom.linear_cross_entropy`. :func:`call` and :func:`gradients` are for other
losses that are built from these ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._core.registration import (
    FLOATS,
    complete,
    differentiable,
    refuse_derivative,
    register_fake,
    require,
)
from .gemm import matmul_precision
from .kept_gradients import multiplied, origins_of, without_derivative

__all__ = ["MODES", "REDUCTIONS", "RESULTS", "Options", "call", "gradients"]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "mean or zero": 3}
MODES = {"auto": 0, "tokens": 1, "vocabulary": 2}

# Results of rows that a call can return, and their bits.
RESULTS = {
    "lse": 1,
    "lse_low": 2,
    "target_logit": 4,
    "weighted": 8,
    "largest": 16,
    "entropy": 32,
    "argmax": 64,
    "rank": 128,
}
_INTEGERS = ("argmax", "rank")
HIDDEN, WEIGHT, BIAS = 1, 2, 4  # gradients
# The bits below are those of headroom.functional.gemm.
ROUND_EACH_CHUNK, _SHIFT, _CHECK_TARGET = 8, 16, 32


@dataclass(frozen=True)
class Options:
    """The numbers that the ops take, as in ``hr_linear_cross_entropy_config``."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    mode: int = 0
    workspace: int = 0
    most_counted: int = -1
    first_class: int = 0
    all_classes: int = 0
    round_each_chunk: bool = False
    shift: bool = False
    check_target: bool = False

    def numbers(self, hidden: Tensor) -> tuple[int | float, ...]:
        """Returns them in the order of the schemas, after ``ignore_index``."""
        flags = matmul_precision(hidden.dtype) if hidden.device.type == "cuda" else 0
        flags |= ROUND_EACH_CHUNK if self.round_each_chunk else 0
        flags |= _CHECK_TARGET if self.check_target else 0
        return (
            *(self.label_smoothing, self.softcap, self.z_loss, self.logit_scale),
            *(self.mode, self.workspace, self.most_counted, self.first_class, self.all_classes),
            flags | (_SHIFT if self.shift else 0),
        )


def call(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    denominator: Tensor | None,
    options: Options,
    *,
    reduction: str = "none",
    results: tuple[str, ...] = (),
    wanted: int = 0,
) -> tuple[Tensor, ...]:
    """Returns the loss, then its factors and the scale of its gradients, then what ``RESULTS``
    names, in that order, then the gradients of hidden, weight and bias, which a backward pass
    overwrites. What is not asked for has no elements.

    A scalar loss carries a gradient; if the gradients that are needed are ``wanted``, they are
    computed now, else in the backward pass. The losses of rows always do the latter, for which
    ``results`` must have ``lse`` and ``lse_low``.

    Args:
        hidden: float32, bfloat16 or float16 ``[..., features]``.
        weight: ``[classes, features]`` in the dtype of hidden.
        bias: ``[classes]`` in that dtype, or None.
        target: int64 or int32 ``[...]``.
        class_weight: float32 ``[classes]``, of all classes where weight holds a part of them, or
            None.
        token_weight: float32 ``[...]``, or None.
        denominator: float32 of one element, or None.
        options: all other numbers.
        reduction: one of ``REDUCTIONS``.
        results: names of ``RESULTS``.
        wanted: a sum of 1 for hidden, 2 for weight and 4 for bias.

    Raises:
        RuntimeError: an argument does not fit.
    """
    return torch.ops.headroom.linear_cross_entropy(
        *(hidden, weight, bias, target, class_weight, token_weight, denominator),
        *(options.ignore_index, REDUCTIONS[reduction], *options.numbers(hidden)),
        *(sum(RESULTS[name] for name in results), wanted),
    )


def gradients(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    factors: Tensor | None,
    lse: Tensor,
    lse_low: Tensor,
    options: Options,
    wanted: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of hidden, weight and bias from those of the rows' losses, with logits
    that are computed again; without elements where they are not ``wanted``, and float32 for
    float16.

    ``lse`` may be that of all parts of the classes, of which ``weight`` holds one.
    """
    return torch.ops.headroom.linear_cross_entropy_backward(
        *(dloss, hidden, weight, bias, target, class_weight, token_weight, factors, lse, lse_low),
        *(options.ignore_index, *options.numbers(hidden), wanted),
    )


# ---- Fakes and FLOPs ---------------------------------------------------------------------------


def _check(hidden, weight, bias, target, class_weight, token_weight, all_classes, flags) -> None:
    require(hidden.dim() > 0, "hidden has no dimensions, wanted [..., cols]")
    require(hidden.dtype in FLOATS, f"hidden has dtype {hidden.dtype}, wanted one of {FLOATS}")
    features = hidden.shape[-1]
    require(
        weight.dim() == 2 and weight.shape[1] == features,
        f"weight must be a matrix [classes, {features}]",
    )
    classes = weight.shape[0]
    for name, tensor in {"weight": weight, "bias": bias}.items():
        if tensor is not None:
            require(
                tensor.dtype == hidden.dtype,
                f"{name} has dtype {tensor.dtype}, but hidden has {hidden.dtype}",
            )
    if bias is not None:
        require(tuple(bias.shape) == (classes,), f"bias must be a tensor [{classes}]")
    require(
        target.dtype in (torch.int64, torch.int32),
        f"target has dtype {target.dtype}, wanted int64 or int32: the number of a class per row",
    )
    require(
        target.shape == hidden.shape[:-1],
        "target must have the shape of hidden without the last dimension",
    )
    require(not flags & _SHIFT or target.dim() > 0, "hidden has no dimension of a sequence")
    sizes = {"class_weight": all_classes or classes, "token_weight": prod(target.shape)}
    for (name, size), tensor in zip(sizes.items(), (class_weight, token_weight)):
        if tensor is not None:
            require(
                tensor.dtype == torch.float32 and tensor.numel() == size,
                f"{name} must be a float32 tensor of {size} elements",
            )


def _grads(hidden: Tensor, weight: Tensor, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype

    def empty(bit: int, shape: tuple[int, ...]) -> Tensor:
        return hidden.new_empty(shape if wanted & bit else (0,), dtype=dtype)

    return (
        empty(HIDDEN, tuple(hidden.shape)),
        empty(WEIGHT, tuple(weight.shape)),
        empty(BIAS, (weight.shape[0],)),
    )


def _fake(*arguments):
    hidden, weight, bias, target, class_weight, token_weight = arguments[:6]
    reduction, all_classes, flags, results, wanted = arguments[8], *arguments[-4:]
    _check(hidden, weight, bias, target, class_weight, token_weight, all_classes, flags)
    rows = hidden.shape[:-1]

    def of(shape, dtype=torch.float32):
        return hidden.new_empty(shape, dtype=dtype)

    is_part = all_classes not in (0, weight.shape[0])
    return (
        of(() if reduction else (0,) if is_part else rows),
        of((2,)),
        of(()),
        *(
            of(
                rows if results & bit else (0,),
                torch.int64 if name in _INTEGERS else torch.float32,
            )
            for name, bit in RESULTS.items()
        ),
        *_grads(hidden, weight, wanted),
    )


def _check_backward(*arguments) -> None:
    dloss, hidden, weight, bias, target, class_weight, token_weight = arguments[:7]
    given = {"dloss": dloss, **dict(zip(("factors", "lse", "lse_low"), arguments[7:10]))}
    for name, tensor in given.items():
        if tensor is not None:
            require(tensor.dtype == torch.float32, f"{name} must be a float32 tensor")
    all_classes, flags = arguments[-3:-1]
    _check(hidden, weight, bias, target, class_weight, token_weight, all_classes, flags)


def _fake_backward(*arguments):
    _check_backward(*arguments)
    return _grads(*arguments[1:3], arguments[-1])


def _fake_backward_in_place(*arguments):
    _check_backward(*arguments)
    return _grads(*arguments[1:3], HIDDEN if arguments[-1] else 0)[0]


def _products(wanted: int) -> int:
    return bool(wanted & HIDDEN) + bool(wanted & WEIGHT)


def _flops(hidden, weight, *rest, **_) -> int:
    """Of the mode that computes logits once; rows that are ignored count too."""
    return 2 * prod(hidden[:-1]) * prod(weight) * (1 + _products(rest[-1]))


def _backward_flops(dloss, hidden, weight, *rest, **_) -> int:
    return 2 * prod(hidden[:-1]) * prod(weight) * (1 + _products(rest[-1]))


@register_flop_formula(torch.ops.headroom.linear_cross_entropy_backward_)
def _backward_flops_in_place(dloss, hidden, weight, *rest, **_) -> int:
    weight_grad, want_hidden = rest[7], rest[-1]
    wanted = HIDDEN * want_hidden + WEIGHT * (weight_grad is not None)
    return 2 * prod(hidden[:-1]) * prod(weight) * (1 + _products(wanted))


# ---- Gradients ---------------------------------------------------------------------------------

_TENSORS = 7  # arguments that are tensors
_BITS = (HIDDEN, WEIGHT, BIAS)


def _needed(ctx: Any) -> int:
    return sum(bit for bit, needed in zip(_BITS, ctx.needs_input_grad) if needed)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    loss, factors, scale, lse, lse_low, *others = output
    ctx.mark_non_differentiable(factors, scale, lse, lse_low, *others)
    ctx.set_materialize_grads(False)
    reduction, results, wanted = inputs[8], *inputs[-2:]
    hidden = inputs[0]
    ctx.dtype = hidden.dtype
    ctx.is_done = reduction != 0 and not _needed(ctx) & ~wanted
    if ctx.is_done:
        ctx.save_for_backward(scale, *others[-3:])
        ctx.origins = origins_of((hidden, *inputs[1:3]), ctx.needs_input_grad)
        return
    both = RESULTS["lse"] | RESULTS["lse_low"]
    require(results & both == both, "a loss of rows needs lse and lse_low for its gradient")
    ctx.save_for_backward(*inputs[: _TENSORS - 1], factors if reduction else None, lse, lse_low)
    ctx.numbers = (inputs[7], *inputs[9:-2])


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple:
    saved = ctx.saved_tensors  # unpacked once: a hook may evaluate them again
    nothing = (None,) * (_TENSORS + 14 - len(_BITS))
    wanted = _needed(ctx)
    if dloss is None or not wanted:
        return (None,) * len(_BITS) + nothing
    if ctx.is_done:
        scale, *grads = saved
        scaled = partial(multiplied, dtype=ctx.dtype, in_place=not torch.is_grad_enabled())
        name, tensors = "linear_cross_entropy_backward", (dloss * scale, *grads)
        found = without_derivative(name, scaled, tensors, ctx.origins)
        found = [grad if wanted & bit else None for bit, grad in zip(_BITS, found)]
    else:
        op = torch.ops.headroom.linear_cross_entropy_backward
        found = [
            grad.to(ctx.dtype) if wanted & bit else None
            for bit, grad in zip(_BITS, op(dloss, *saved, *ctx.numbers, wanted))
        ]
    return (*found, *nothing)


differentiable(
    "linear_cross_entropy", fake=_fake, setup_context=_setup, backward=_backward, flops=_flops
)
refuse_derivative("linear_cross_entropy_backward", fake=_fake_backward, flops=_backward_flops)
register_fake("linear_cross_entropy_backward_", _fake_backward_in_place)
complete("linear_cross_entropy_backward_")
