"""Norms of rows with gradients: ``headroom::rms_norm`` and ``headroom::layer_norm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.registration import differentiable, refuse_derivative
from .._core.rows import check_rows, check_tensors, promoted

__all__ = ["layer_norm", "rms_norm"]

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
    if casting not in CASTINGS:
        raise ValueError(f"casting is {casting!r}, wanted one of {', '.join(CASTINGS)}")
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


# ---- Fakes: the shapes and dtypes of the results ---------------------------------------------


def _empty(x: Tensor, wanted: bool = True) -> Tensor:
    return x.new_empty(x.shape if wanted else (0,))


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_rms_norm(x, weight, residual, eps, offset, casting):
    check_rows(x, {"residual": residual}, {"weight": weight})
    return _empty(x), _empty(x, residual is not None), _statistics(x)


def _fake_layer_norm(x, weight, bias, residual, eps):
    check_rows(x, {"residual": residual}, {"weight": weight, "bias": bias})
    return _empty(x), _empty(x, residual is not None), _statistics(x), _statistics(x)


def _vector(x: Tensor, like: Tensor | None, wanted: bool) -> Tensor:
    return x.new_empty(x.shape[-1:] if wanted else (0,), dtype=(x if like is None else like).dtype)


def _fake_rms_norm_backward(
    dy, dsum, x, weight, rstd, offset, casting, want_dx, want_dweight, want_y
):
    check_rows(x, {"dy": dy, "dsum": dsum}, {"weight": weight})
    return _empty(x, want_dx), _vector(x, weight, want_dweight), _empty(x, want_y)


def _fake_layer_norm_backward(
    dy, dsum, x, weight, bias, mean, rstd, want_dx, want_dweight, want_dbias, want_y
):
    check_rows(x, {"dy": dy, "dsum": dsum}, {"weight": weight, "bias": bias})
    like = bias if weight is None else weight
    vectors = _vector(x, like, want_dweight), _vector(x, like, want_dbias)
    return _empty(x, want_dx), *vectors, _empty(x, want_y)


# ---- Gradients -------------------------------------------------------------------------------


def _save(ctx: Any, tensors: tuple, statistics: tuple[Tensor, ...], residual: Any) -> None:
    ctx.save_for_backward(*tensors, *statistics)
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.has_residual = residual is not None


def _setup_rms_norm(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight, residual, _, ctx.offset, ctx.casting = inputs
    _, total, rstd = output
    _save(ctx, (x if residual is None else total, weight), (rstd,), residual)


def _backward_rms_norm(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: None) -> tuple:
    x, weight, rstd = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    if dy is None:
        return dsum, None, dsum, None, None, None
    dx, dweight, _ = torch.ops.headroom.rms_norm_backward(
        dy,
        dsum if ctx.has_residual else None,
        x,
        weight,
        rstd,
        ctx.offset,
        ctx.casting,
        wanted[0] or wanted[2],
        wanted[1],
        False,
    )
    return (
        dx if wanted[0] else None,
        dweight if wanted[1] else None,
        dx if wanted[2] else None,
        None,
        None,
        None,
    )


def _setup_layer_norm(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _ = inputs
    _, total, mean, rstd = output
    _save(ctx, (x if residual is None else total, weight, bias), (mean, rstd), residual)


def _backward_layer_norm(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: None) -> tuple:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    if dy is None:
        return dsum, None, None, dsum, None
    dx, dweight, dbias, _ = torch.ops.headroom.layer_norm_backward(
        dy,
        dsum if ctx.has_residual else None,
        x,
        weight,
        bias,
        mean,
        rstd,
        wanted[0] or wanted[3],
        wanted[1],
        wanted[2],
        False,
    )
    return (
        dx if wanted[0] else None,
        dweight if wanted[1] else None,
        dbias if wanted[2] else None,
        dx if wanted[3] else None,
        None,
    )


differentiable(
    "rms_norm", fake=_fake_rms_norm, setup_context=_setup_rms_norm, backward=_backward_rms_norm
)
differentiable(
    "layer_norm",
    fake=_fake_layer_norm,
    setup_context=_setup_layer_norm,
    backward=_backward_layer_norm,
)
refuse_derivative("rms_norm_backward", fake=_fake_rms_norm_backward)
refuse_derivative("layer_norm_backward", fake=_fake_layer_norm_backward)
