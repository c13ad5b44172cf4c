"""DoRA: a linear layer with an adapter, each row of whose sum has a length that is trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.registration import FLOATS
from .._core.rows import autocast_dtype
from .._core.surroundings import takes_ops
from ..functional.linear import linear
from ..functional.lora import lora_linear, lora_norms
from ..functional.quantize_matrix import QuantizedMatrix


class Magnitude(nn.Module):
    """Holds the lengths of rows that DoRA trains."""

    def __init__(self, lengths: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(lengths)


def row_norms(
    weight: Tensor | QuantizedMatrix,
    a: Tensor,
    b: Tensor,
    scale: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the norms of the rows of ``W + scale * b @ a``, as constants: float32, of a weight in
    float64 float64. Only where ops do not take the weight is that matrix made. ``dtype`` is what
    products decode few bits to, if it is another than that of the weight before."""
    a, b = a.detach(), b.detach()
    if isinstance(weight, QuantizedMatrix) and dtype in FLOATS:
        weight = dataclasses.replace(weight, dtype=dtype)
    if isinstance(weight, QuantizedMatrix) or takes_ops(weight):
        if a.dtype != torch.float32 and a.dtype != weight.dtype:
            a, b = a.float(), b.float()
        return lora_norms(weight, a, b, scale=scale)
    total = weight.detach() + scale * (b @ a)
    wide = torch.promote_types(total.dtype, torch.float32)
    return torch.linalg.vector_norm(total, dim=1, dtype=wide)


def row_factors(magnitude: Tensor, norms: Tensor) -> Tensor:
    """Returns what rows of these norms are multiplied with to get the lengths of a magnitude. A row
    of zeros stays one."""
    return magnitude.to(norms.dtype) / norms.clamp_min(torch.finfo(norms.dtype).tiny)


def scale_columns(y: Tensor, factors: Tensor, addend: Tensor | None = None) -> Tensor:
    """Returns ``y * factors + addend``, rounded once, in the dtype of ``y``.

    Args:
        y: ``[..., out]``, which is kept for the backward pass.
        factors: ``[out]``, float32, or float64 if ``y`` is.
        addend: ``[out]`` or ``[..., out]``, or None.
    """
    return _Scale.apply(y, factors, addend)


class _Scale(torch.autograd.Function):
    """Multiplies rows by factors and adds to them, and keeps the rows in their own dtype, where
    operations of torch would keep 16-bit tensors in float32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, factors: Tensor, addend: Tensor | None) -> Any:
        wide = y.to(factors.dtype)
        if addend is None:
            return (wide * factors).to(y.dtype)
        return torch.addcmul(addend.to(factors.dtype), wide, factors).to(y.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        y, factors, addend = inputs
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, factors)
        ctx.dtype = y.dtype
        ctx.addend = None if addend is None else (addend.shape, addend.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y, factors = ctx.saved_tensors
        needs_y, needs_factors, needs_addend = ctx.needs_input_grad
        wide, found = dy.to(factors.dtype), [None, None, None]
        if needs_y:
            found[0] = (wide * factors).to(ctx.dtype)
        if needs_factors:
            found[1] = (wide * y.to(factors.dtype)).sum_to_size(factors.shape)
        if needs_addend:
            shape, dtype = ctx.addend
            found[2] = wide.sum_to_size(shape).to(dtype)
        return tuple(found)


def dora_linear(
    base: Any,
    weight: Tensor | QuantizedMatrix,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    magnitude: Tensor,
    *,
    scale: float,
    dropout: float,
    fused: bool,
) -> Tensor:
    """Returns ``magnitude / |W + scale b a| * (x @ W.T + scale * (x @ a.T) @ b.T) + bias`` (DoRA,
    Liu et al., arXiv:2402.09353), as PEFT computes it: the norms of the rows are constants for the
    gradient.

    With dropout there are two products with ``W``: that of x itself, and that of the dropped x, of
    which the factor less 1 and the adapter's part are added.

    Args:
        base: the linear layer.
        weight: its matrix ``W``, ``[out, in]``.
        x: ``[..., in]``.
        a, b: as in :func:`headroom.functional.lora_linear`.
        magnitude: ``[out]``.
        scale: the factor of the adapter's part.
        dropout: the probability with which elements of x are zero.
        fused: whether ``lora_linear`` may take the place of a call of the base.
    """
    dtype = autocast_dtype(x.device.type) or x.dtype
    factors = row_factors(magnitude, row_norms(weight, a, b, scale, dtype))
    addend = base.bias
    if dropout:
        dropped = F.dropout(x, dropout)
        addend, x = base(x - dropped), dropped
    if fused:
        y = lora_linear(x, weight, None, a, b, scale=scale)
    else:
        y = base(x)
        y = y if base.bias is None else y - base.bias.to(y.dtype)
        t = linear(x, a.to(x.dtype)) * scale
        y = y + linear(t, b.to(t.dtype)).to(y.dtype)
    return scale_columns(y, factors, addend)
