"""Multiplies rows with a matrix of 4 or 8 bits: ``headroom::linear_quantized``."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.registration import FLOATS, differentiable, require
from .._core.rows import autocast_dtype, cast, check_tensors
from .gemm import matmul_precision
from .quantize_matrix import QuantizedMatrix, check_matrix, layout_of, require_fit


def linear_quantized(x: Tensor, q: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """Returns ``x @ W.T + bias`` for a matrix ``W`` of 4 or 8 bits, which has no gradient.

    The matrix is decoded to the dtype of ``x`` in parts of about 4 MiB, or 32 MiB on CUDA, each of
    which is multiplied before the next; for few rows of ``x`` it is decoded on the way, and nothing
    but the result is written. Neither ``x`` nor a decoded part is kept for the backward pass, which
    decodes the matrix again.

    Args:
        x: float32, bfloat16 or float16 ``[..., cols]``.
        q: ``[rows, cols]``, from :func:`quantize_matrix`. Its own ``dtype`` does not matter.
        bias: ``[rows]``, of the dtype of ``x``.

    Returns:
        A contiguous tensor ``[..., rows]``, which has gradients of any order. Under autocast, ``x``
        and ``bias`` are cast as ``torch.nn.functional.linear`` casts them.

    Raises:
        RuntimeError: an argument does not fit.
        TypeError: ``x`` is no tensor, or ``q`` no such matrix.

    On CUDA it follows ``torch.backends.cuda.matmul`` and ``torch.use_deterministic_algorithms``.
    The formula is documented at ``hr_linear_forward`` in ``headroom.h``.
    """
    check_tensors(x=x)
    check_matrix("q", q)
    require(len(q.shape) == 2, f"q is a stack {[*q.shape]}, wanted a matrix [rows, cols]")
    rows, cols = q.shape
    require(
        x.dim() > 0 and x.shape[-1] == cols,
        f"x is {[*x.shape]}, wanted [..., {cols}] for a matrix {[rows, cols]}",
    )
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, bias = cast(dtype, x, bias)
    return torch.ops.headroom.linear_quantized(
        x,
        q.codes,
        q.scales,
        bias,
        rows,
        *layout_of(q),
        matmul_precision(x.dtype) if x.device.type == "cuda" else 0,
    )


def weight_and_bias(linear: Any, dtype: torch.dtype | None = None) -> tuple[Any, Tensor | None]:
    """Returns the weight and bias of a linear layer; of one of few bits its matrix, and the bias in
    ``dtype``, in which that computes."""
    matrix, bias = getattr(linear, "matrix", None), linear.bias
    if not isinstance(matrix, QuantizedMatrix):
        return linear.weight, bias
    return matrix, None if bias is None else bias.to(dtype)


def quantized_linear_forward(module: Any, input: Tensor) -> Tensor:
    """Computes the forward of a linear layer whose ``matrix`` is a :class:`QuantizedMatrix`."""
    matrix, bias = weight_and_bias(module, input.dtype)
    return linear_quantized(input, matrix, bias)


_NUMBERS = ("format", "block_size", "nested", "precision")


def _product_fake(name: str, x: Tensor, other: int) -> Tensor:
    require(x.dim() > 0, f"{name} has no dimensions, wanted [..., cols]")
    require(x.dtype in FLOATS, f"{name} has dtype {x.dtype}, wanted one of {FLOATS}")
    return x.new_empty((*x.shape[:-1], other))


def _fake(x, codes, scales, bias, rows, format, block_size, nested, **_):
    y = _product_fake("x", x, rows)
    require_fit(codes, scales, rows, x.shape[-1], format, block_size, nested)
    if bias is not None:
        require(bias.dtype == x.dtype, f"bias has dtype {bias.dtype}, but x has {x.dtype}")
        require(bias.dim() == 1 and bias.shape[0] == rows, f"bias must be a tensor [{rows}]")
    return y


def _fake_backward(dy, codes, scales, cols, format, block_size, nested, **_):
    dx = _product_fake("dy", dy, cols)
    require_fit(codes, scales, dy.shape[-1], cols, format, block_size, nested)
    return dx


def _save(ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
    ctx.save_for_backward(given["codes"], given["scales"])
    ctx.numbers = {name: given[name] for name in _NUMBERS}
    ctx.other = (given["x"] if "x" in given else given["dy"]).shape[-1]


def _backward(
    ctx: Any, grads: dict[str, Tensor], needs: dict[str, bool]
) -> dict[str, Tensor | None]:
    codes, scales = ctx.saved_tensors
    dy, found = grads["y"], {}
    if needs["x"]:
        found["x"] = torch.ops.headroom.linear_quantized_backward(
            dy, codes, scales, ctx.other, **ctx.numbers
        )
    if needs["bias"]:
        found["bias"] = dy.sum_to_size(dy.shape[-1:])
    return found


def _backward_of_backward(
    ctx: Any, grads: dict[str, Tensor], needs: dict[str, bool]
) -> dict[str, Tensor | None]:
    """Returns the product of the other pass, because ``dx`` is linear in ``dy``."""
    codes, scales = ctx.saved_tensors
    ddy = torch.ops.headroom.linear_quantized(
        grads["dx"], codes, scales, None, ctx.other, **ctx.numbers
    )
    return {"dy": ddy}


differentiable(
    "linear_quantized",
    fake=_fake,
    save=_save,
    backward=_backward,
    flops=lambda x, rows, **_: 2 * prod(x) * rows,
)
differentiable(
    "linear_quantized_backward",
    fake=_fake_backward,
    save=_save,
    backward=_backward_of_backward,
    flops=lambda dy, cols, **_: 2 * prod(dy) * cols,
)
