"""The op ``headroom::linear_cross_entropy`` and its backward ops: fakes, gradients and FLOPs.

Users call :func:`headroom.linear_cross_entropy`. :func:`call` and :func:`gradients` are for other
losses that are built from these ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.registration import by_name, register_flops, require
from .._core.row_ops import FLOAT32, MATRIX, Gradient, kind, row_op
from .gemm import matmul_precision
from .kept_gradients import KeptGradient, multiplied
from .quantize_matrix import QuantizedMatrix, layout_of, require_fit

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "mean or zero": 3}
MODES = {"auto": 0, "tokens": 1, "vocabulary": 2}

# Results of rows that a call can return, and their bits.
RESULTS = {
    "lse": 1,
    "lse_low": 2,
    "target_logit": 4,
    "largest": 8,
    "entropy": 16,
    "argmax": 32,
    "rank": 64,
    "mean_logit": 128,
    "log_sum_sq_probs": 256,
}
HIDDEN, WEIGHT, BIAS = 1, 2, 4  # gradients


@dataclass(frozen=True)
class Options:
    """Holds the numbers that the ops take, as in ``hr_linear_cross_entropy_config``."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    mode: int = 0
    workspace_limit: int = 0
    check_target: bool = False
    shift: bool = False

    def numbers(self, hidden: Tensor) -> dict[str, int | float]:
        """Returns them for an op, by name."""
        precision = matmul_precision(hidden.dtype) if hidden.device.type == "cuda" else 0
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return numbers | {"order": self.mode, "precision": precision}


_NUMBERS = tuple(each.name for each in fields(Options))
_forward, _backward = by_name("linear_cross_entropy"), by_name("linear_cross_entropy_backward")


def of_weight(
    weight: Tensor | QuantizedMatrix,
) -> tuple[dict[str, Tensor | None], dict[str, int | bool]]:
    """Returns the tensors and the numbers that say to an op what the weight is, by name."""
    if not isinstance(weight, QuantizedMatrix):
        described = {"classes": 0, "format": 0, "block_size": 0, "nested": False}
        return {"weight": weight, "codes": None, "scales": None}, described
    layout = dict(zip(("format", "block_size", "nested"), layout_of(weight)))
    described = {"classes": weight.shape[0], **layout}
    return {"weight": None, "codes": weight.codes, "scales": weight.scales}, described


def call(
    options: Options,
    *,
    reduction: str = "none",
    results: Iterable[str] = (),
    wanted: int = 0,
    weight: Tensor | QuantizedMatrix,
    **tensors: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the loss, then its factors and the scale of its gradients, then what ``RESULTS``
    names, in that order, then the gradients of hidden, weight and bias, which a backward pass
    overwrites. What is not asked for has no elements.

    A scalar loss carries a gradient; if the gradients that are needed are ``wanted``, they are
    computed now, else in the backward pass. The losses of rows always do the latter, for which
    ``results`` must have ``lse`` and ``lse_low``; their entropies carry a gradient too.

    Args:
        options: all other numbers.
        reduction: one of ``REDUCTIONS``.
        results: names of ``RESULTS``.
        wanted: a sum of 1 for hidden, 2 for weight and 4 for bias.
        weight: ``[classes, features]`` in the dtype of hidden, or a matrix of few bits, which has
            no gradient.
        tensors: ``hidden``, float32, bfloat16 or float16 ``[..., features]``; ``bias``,
            ``[classes]`` in that dtype, or None; ``target``, int64 or int32 ``[...]``;
            ``class_weight``, float32 ``[classes]``, or None; ``token_weight``, float32 ``[...]``,
            or None; ``denominator``, float32 of one element, or None.

    Raises:
        RuntimeError: an argument does not fit.
    """
    numbers = options.numbers(tensors["hidden"])
    numbers |= {"reduction": REDUCTIONS[reduction], "wanted": wanted}
    bits = sum(RESULTS[name] for name in results)
    own, described = of_weight(weight)
    return _forward(**tensors, **own, **described, **numbers, results=bits)


def gradients(
    options: Options, wanted: int, weight: Tensor | QuantizedMatrix, **tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the gradients of hidden, weight and bias from those of the rows' losses, ``dloss``,
    with logits that are computed again; without elements where they are not ``wanted``, and float32
    for float16.

    The other tensors are those of :func:`call`, and of its results ``factors``, or None, ``lse``
    and ``lse_low``. ``dentropy``, if given, is the gradient of the rows' ``entropy``, which is then
    a result too.
    """
    numbers = options.numbers(tensors["hidden"])
    tensors = {"entropy": None, "dentropy": None} | tensors
    own, described = of_weight(weight)
    return _backward(**tensors, **own, **described, **numbers, wanted=wanted)


# ---- Fakes and FLOPs ---------------------------------------------------------------------------

_ROW, _INTEGERS = kind("rows", dtypes=FLOAT32), (torch.int64, torch.int32)
_KINDS = {
    "hidden": MATRIX,
    "weight": kind("classes cols"),
    "bias": kind("classes"),
    "target": kind("rows", dtypes=_INTEGERS),
    "class_weight": kind("classes", dtypes=FLOAT32),
    "token_weight": _ROW,
    "denominator": kind("", "1", dtypes=FLOAT32),
    "dloss": kind("rows", "", dtypes=FLOAT32),
    "factors": kind("2", dtypes=FLOAT32),
    "lse": _ROW,
    "lse_low": _ROW,
    "entropy": kind("rows", dtypes=FLOAT32, where="results", bit=RESULTS["entropy"]),
    "dentropy": kind("rows", "", dtypes=FLOAT32),
    "weight_grad": kind("classes cols", dtypes=(torch.float32, torch.bfloat16)),
    "bias_grad": kind("classes", dtypes=(torch.float32, torch.bfloat16)),
}
_OF_CLASSES = ("argmax", "rank")  # integers


def _check(
    hidden, weight, codes, scales, target, classes, format, block_size, nested, shift, **_: Any
) -> None:
    require(not shift or target.dim() > 0, "hidden has no dimension of a sequence")
    given = (weight is not None, codes is not None, scales is not None)
    require(
        given == ((True, False, False) if format == 0 else (False, True, True)),
        "wanted weight for format 0, else codes and scales",
    )
    if format != 0:
        require_fit(codes, scales, classes, hidden.shape[-1], format, block_size, nested)


def _classes(weight: Any, classes: int) -> int:
    return classes if weight is None else weight.shape[0]


def _gradients(hidden, weight, classes, wanted=0, want_hidden=None, **_):
    require(not (weight is None and wanted & WEIGHT), "a weight of few bits has no gradient")
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype

    def empty(bit: int, shape: tuple[int, ...]) -> Tensor:
        return hidden.new_empty(shape if wanted & bit else (0,), dtype=dtype)

    if want_hidden is not None:  # others are added to tensors that exist
        return hidden.new_empty(hidden.shape if want_hidden else (0,), dtype=dtype)
    return (
        empty(HIDDEN, tuple(hidden.shape)),
        empty(WEIGHT, () if weight is None else tuple(weight.shape)),
        empty(BIAS, (_classes(weight, classes),)),
    )


def _results(hidden, weight, reduction, results, wanted, classes, **_):
    rows = hidden.shape[:-1]

    def of(shape, dtype=torch.float32):
        return hidden.new_empty(shape, dtype=dtype)

    return (
        of(() if reduction else rows),
        of((2,)),
        of(()),
        *(
            of(
                rows if results & bit else (0,),
                torch.int64 if name in _OF_CLASSES else torch.float32,
            )
            for name, bit in RESULTS.items()
        ),
        *_gradients(hidden, weight, classes, wanted),
    )


def _logits(hidden, weight, classes, **_) -> int:
    """Returns the work of the logits, which the backward pass computes again; rows that are ignored
    count too."""
    return 2 * prod(hidden) * (classes if weight is None else weight[0])


def _flops(wanted, **given) -> int:
    """Returns the work of the mode that computes logits once."""
    return _logits(**given) * (1 + bool(wanted & HIDDEN) + bool(wanted & WEIGHT))


def _flops_into(weight_grad, want_hidden, **given) -> int:
    return _flops(wanted=HIDDEN * want_hidden + WEIGHT * (weight_grad is not None), **given)


# ---- Gradients ---------------------------------------------------------------------------------


def _needed(needs: Iterable[bool]) -> int:
    return sum(bit for bit, needed in zip((HIDDEN, WEIGHT, BIAS), needs) if needed)


def _saved(given: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Tensor | None]:
    both = RESULTS["lse"] | RESULTS["lse_low"]
    is_there = given["results"] & both == both
    require(is_there, "a loss of rows needs lse and lse_low for its gradient")
    saved = {} if given["reduction"] else {"factors": None}
    return saved if given["results"] & RESULTS["entropy"] else saved | {"entropy": None}


def _scaled(dloss, scale, *grads, **options):
    return multiplied(dloss * scale, *grads, **options)


def _gradient(derived: Gradient) -> KeptGradient:
    return KeptGradient(
        derived,
        inputs=("hidden", "weight", "bias"),
        kept=("scale", "dhidden", "dweight", "dbias"),
        is_done=lambda given, needs: given["reduction"] and not _needed(needs) & ~given["wanted"],
        scaled=lambda dtype: partial(_scaled, dtype=dtype, in_place=not torch.is_grad_enabled()),
    )


row_op(
    "linear_cross_entropy",
    _KINDS,
    sizes=lambda weight, classes, **_: {"classes": _classes(weight, classes)},
    check=_check,
    results=_results,
    gradients=_gradients,
    gradient=_gradient,
    saved=_saved,
    scalars=lambda given, needs: {"wanted": _needed(needs.values())},
    flops=_flops,
    backward_flops=_flops,
    again=_logits,
)
register_flops("linear_cross_entropy_backward_", _flops_into, _logits)
