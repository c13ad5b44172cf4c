"""Norms of rows with gradients: ``headroom::rms_norm`` and ``headroom::layer_norm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_choice
from .._core.registration import FLOATS, require
from .._core.row_ops import FLOAT32, MATRIX, kind, row_op
from .._core.rows import check_tensors, promoted

CASTINGS = {"once": 0, "llama": 1, "narrow": 2}


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns ``x / sqrt(mean(x ** 2) + eps) * (weight + offset)``, over the last dimension.

    Keeps x and four bytes per row for the backward pass, whatever the dtype, and gives gradients of
    x, weight and residual. Statistics are float32. Autocast changes no dtypes here.

    Args:
        x: float32, bfloat16 or float16 ``[..., cols]``, of any strides.
        weight: ``[cols]`` in any of these dtypes, or None for ones.
        eps: added to the mean of squares.
        offset: added to the weight; 1.0 for Gemma. Ignored without a weight.
        casting: where values are rounded to the dtype of ``x``: "once" rounds the result alone, as
            ``torch.nn.functional.rms_norm`` and Gemma do; "llama" also rounds before the weight
            multiplies, as Llama, Qwen and Mistral do; "narrow" also rounds the reciprocal root.
        residual: like ``x``; it is added to ``x`` first, and the result is then a pair: the norm of
            the sum, and the sum, which is the residual of the next block. Under autocast the dtypes
            may differ, and the wider counts.

    Returns:
        A contiguous tensor like ``x``, or a pair of them with ``residual``.

    Raises:
        ValueError: ``casting`` is none of the three.
        RuntimeError: another argument does not fit.

    The formula and its source are documented at ``hr_norm_forward`` in ``headroom.h``.
    """
    check_tensors(x=x)
    check_choice("casting", casting, CASTINGS)
    if residual is not None:
        x, residual = promoted(x, residual)
    y, total, _ = torch.ops.headroom.rms_norm(x, weight, residual, eps, offset, CASTINGS[casting])
    return y if residual is None else (y, total)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, over the last dimension.

    Keeps x and eight bytes per row for the backward pass, whatever the dtype, and gives gradients
    of x, weight, bias and residual. Statistics are float32, and the result is rounded once.
    Autocast changes no dtypes here.

    Args:
        x: float32, bfloat16 or float16 ``[..., cols]``, of any strides.
        weight, bias: ``[cols]`` in any of these dtypes, the same for both, or None.
        eps: added to the variance, which is the mean of squares about the mean.
        residual: as in :func:`rms_norm`.

    Returns:
        A contiguous tensor like ``x``, or a pair of them with ``residual``.

    Raises:
        RuntimeError: an argument does not fit.

    The formula and its source are documented at ``hr_norm_forward`` in ``headroom.h``.
    """
    check_tensors(x=x)
    if residual is not None:
        x, residual = promoted(x, residual)
    y, total, _, _ = torch.ops.headroom.layer_norm(x, weight, bias, residual, eps)
    return y if residual is None else (y, total)


def _check(weight: Tensor | None, bias: Tensor | None = None, **_: Any) -> None:
    both = weight is None or bias is None or weight.dtype == bias.dtype
    require(both, "bias has another dtype than weight")


def _saved(given: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Tensor | None]:
    return {} if given["residual"] is None else {"x": results["sum"]}


_ROW, _VECTOR = kind("rows", dtypes=FLOAT32), kind("cols", dtypes=FLOATS)
_KINDS = {"x": MATRIX, "residual": MATRIX, "weight": _VECTOR}
_RESULTS = {"y": MATRIX, "sum": kind("rows cols", where="residual"), "rstd": _ROW}
_RULES = {"also": {"residual": "x"}, "alone": {"dsum": ("x", "residual")}, "saved": _saved}
row_op("rms_norm", _KINDS | _RESULTS, **_RULES)
row_op("layer_norm", _KINDS | {"bias": _VECTOR, "mean": _ROW} | _RESULTS, check=_check, **_RULES)
