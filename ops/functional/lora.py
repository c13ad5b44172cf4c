"""Multiplies rows with a frozen matrix and its adapters: ``headroom::lora_linear``."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_count, check_number
from .._core.registration import (
    FLOATS,
    complete,
    differentiable,
    refuse_derivative,
    register_fake,
    register_flops,
    require,
)
from .._core.rows import autocast_dtype, cast, check_tensors
from .gemm import matmul_precision
from .quantize_matrix import DENSE, QuantizedMatrix, parts_of, require_fit


def lora_linear(
    x: Tensor,
    weight: Tensor | QuantizedMatrix,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Returns ``x @ W.T + bias + scale * (drop(x) @ a.T) @ b.T`` for a matrix ``W`` that stays as
    it is (LoRA, arXiv:2106.09685), and may have 4 or 8 bits (QLoRA, arXiv:2305.14314).

    For the backward pass it keeps ``x`` itself, which other layers may keep too, and ``rank``
    numbers per row: no copy of ``x`` in another dtype, no mask, no dropped ``x``, and no decoded
    matrix. Which elements are dropped is a function of the seed and of an element's row and
    column, and is computed again. A matrix of few bits is decoded in parts, as in
    :func:`linear_quantized`.

    Args:
        x: float32, bfloat16 or float16 ``[..., in]``.
        weight: ``[out, in]``, of the dtype of ``x``, or a matrix from :func:`quantize_matrix`.
        bias: ``[out]``, of the dtype of ``x``, or None.
        a, b: ``[rank, in]`` and ``[out, rank]``: both float32, or both of the dtype of ``x``. They
            are rounded to the dtype of ``x`` for the products, which are summed in float32, and
            have gradients in their own dtype.
        scale: the factor of the adapters' part: ``alpha / rank``.
        dropout: the probability, below 1, with which an element of ``x`` is dropped for the
            adapters. It is rounded to a multiple of 2^-16, and so is the factor of the others,
            ``1 / (1 - dropout)``.
        seed: for dropout: a number, or an int64 tensor of one element on the device of ``x``. None
            draws one from torch's generator of the device, as torch's dropout does, so that
            ``torch.manual_seed`` and ``torch.utils.checkpoint`` repeat it, and a CUDA graph draws
            anew.

    Returns:
        A contiguous tensor ``[..., out]``, with gradients of ``x``, ``bias``, ``a`` and ``b``; a
        second derivative raises. Under autocast, ``x``, ``bias`` and a dense ``weight`` are cast as
        ``torch.nn.functional.linear`` casts them.

    Raises:
        RuntimeError: an argument does not fit, or ``weight`` requires grad.
        TypeError: an argument that must be a tensor is none.
        ValueError: ``dropout`` is not from 0 to below 1.

    In 16 bits the adapters' part and the bias are rounded once, before the product with ``W`` is
    added to them, which is rounded once more. On CUDA it follows ``torch.backends.cuda.matmul`` and
    ``torch.use_deterministic_algorithms``. The formula is documented at ``hr_lora_forward`` in
    ``headroom.h``.
    """
    check_tensors(x=x, a=a, b=b)
    check_dropout(dropout)
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, bias = cast(dtype, x, bias)
    if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "weight requires grad, but gets no gradient beside adapters; freeze it with "
            "requires_grad_(False), or use torch.nn.functional.linear"
        )
    codes, scales, shape, layout = parts_of(weight)
    if scales is None and dtype is not None:
        (codes,) = cast(dtype, codes)
    require(
        x.dim() > 0 and x.shape[-1] == shape[1],
        f"x is {[*x.shape]}, wanted [..., {shape[1]}] for a matrix {[*shape]}",
    )
    y, _ = torch.ops.headroom.lora_linear(
        x,
        codes,
        scales,
        bias,
        a,
        b,
        seed_of(seed, x.device) if dropout else None,
        shape[0],
        *layout,
        scale,
        dropout,
        matmul_precision(x.dtype) if x.device.type == "cuda" else 0,
    )
    return y


def lora_norms(
    weight: Tensor | QuantizedMatrix, a: Tensor, b: Tensor, *, scale: float = 1.0
) -> Tensor:
    """Returns the norms of the rows of ``W + scale * b @ a``, by which DoRA (arXiv:2402.09353)
    divides a layer, without making that matrix.

    They are constants: no gradient passes through them. A matrix of few bits is decoded to its
    ``dtype`` in parts, and a dense one is read where it lies.

    Args:
        weight: ``[out, in]``, float32, bfloat16 or float16, or a matrix from
            :func:`quantize_matrix`.
        a, b: ``[rank, in]`` and ``[out, rank]``, as in :func:`lora_linear`.
        scale: the factor of ``b @ a``.

    Returns:
        float32 ``[out]``.

    Raises:
        RuntimeError: an argument does not fit.
        TypeError: an argument is no tensor.

    The formula is documented at ``hr_lora_norms`` in ``headroom.h``.
    """
    check_tensors(a=a, b=b)
    codes, scales, shape, layout = parts_of(weight)
    for name, adapter, k in (("a", a, 1), ("b", b, 0)):
        require(
            adapter.dim() == 2 and adapter.shape[k] == shape[k],
            f"{name} is {[*adapter.shape]}, wanted a matrix that fits {[*shape]}",
        )
    precision = matmul_precision(weight.dtype) if a.device.type == "cuda" else 0
    return torch.ops.headroom.lora_norms(
        *(codes.detach(), scales, a.detach(), b.detach()), *layout, weight.dtype, scale, precision
    )


def check_dropout(p: float) -> None:
    """Raises where the probability with which elements are dropped is not from 0 to below 1."""
    check_number("dropout", p)
    if not 0 <= p < 1:
        raise ValueError(f"dropout is {p}, wanted a number from 0 to below 1")


def seed_of(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Returns the seed of a call as a tensor: one that is drawn, for None."""
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if isinstance(seed, Tensor):
        return seed
    check_count("seed", seed)
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}, wanted an integer of 64 bits")
    return torch.full((), seed, dtype=torch.int64, device=device)


_NUMBERS = ("format", "block_size", "nested", "scale", "dropout", "precision")


def _check(name, given, rows, cols, weight, scales, a, b, seed, format, block_size, nested) -> None:
    require(given.dtype in FLOATS, f"{name} has dtype {given.dtype}, wanted one of {FLOATS}")
    if format == DENSE:
        require(weight.shape == (rows, cols), f"weight is {[*weight.shape]}, wanted {[rows, cols]}")
        require(
            weight.dtype == given.dtype,
            f"weight has dtype {weight.dtype}, but {name} {given.dtype}",
        )
    else:
        require(scales is not None, "scales is None, but weight has few bits")
        require_fit(weight, scales, rows, cols, format, block_size, nested)
    require(
        a.dtype in (torch.float32, given.dtype),
        f"a has dtype {a.dtype}, wanted float32 or that of {name}, {given.dtype}",
    )
    require(b.dtype == a.dtype, f"b has dtype {b.dtype}, but a has {a.dtype}")
    require(
        a.dim() == 2 and a.shape[0] > 0 and a.shape[1] == cols,
        f"a is {[*a.shape]}, wanted [rank, {cols}] with 1 row or more",
    )
    require(b.shape == (rows, a.shape[0]), f"b is {[*b.shape]}, wanted {[rows, a.shape[0]]}")
    if seed is not None:
        require(
            seed.dtype == torch.int64 and seed.numel() == 1,
            f"seed has {seed.numel()} elements of {seed.dtype}, wanted one of int64",
        )


def _fake(x, weight, scales, bias, a, b, seed, rows, format, block_size, nested, **_):
    require(x.dim() > 0, "x has no dimensions, wanted [..., in]")
    _check("x", x, rows, x.shape[-1], weight, scales, a, b, seed, format, block_size, nested)
    if bias is not None:
        require(bias.dtype == x.dtype, f"bias has dtype {bias.dtype}, but x has {x.dtype}")
        require(bias.shape == (rows,), f"bias is {[*bias.shape]}, wanted {[rows]}")
    return x.new_empty((*x.shape[:-1], rows)), x.new_empty((*x.shape[:-1], a.shape[0]))


def _fake_backward(
    dy, x, t, weight, scales, a, b, seed, cols, format, block_size, nested, want_dx, want_da,
    want_db, **_
):  # fmt: skip
    require(dy.dim() > 0, "dy has no dimensions, wanted [..., out]")
    _check("dy", dy, dy.shape[-1], cols, weight, scales, a, b, seed, format, block_size, nested)
    for wanted, given, name in ((want_da, x, "x"), (want_db, t, "t")):
        require(
            not wanted or given is not None,
            f"{name} is None, but a gradient is wanted that reads it",
        )
    return (
        dy.new_empty((*dy.shape[:-1], cols) if want_dx else (0,)),
        a.new_empty(a.shape if want_da else (0,)),
        b.new_empty(b.shape if want_db else (0,)),
    )


def _fake_norms(weight, scales, a, b, format, block_size, nested, dtype, **_):
    rows, cols = b.shape[0], a.shape[1]
    given = a.new_empty((0, cols), dtype=dtype)
    _check("weight", given, rows, cols, weight, scales, a, b, None, format, block_size, nested)
    return a.new_empty(rows, dtype=torch.float32)


def _save(ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
    *_, needs_a, needs_b = ctx.needs_input_grad[:6]
    ctx.save_for_backward(
        given["x"] if needs_a else None,
        results["t"] if needs_b else None,
        *(given[name] for name in ("weight", "scales", "a", "b", "seed")),
    )
    ctx.mark_non_differentiable(results["t"])
    ctx.numbers = {name: given[name] for name in _NUMBERS}
    ctx.cols = given["x"].shape[-1]


def _backward(
    ctx: Any, grads: dict[str, Tensor | None], needs: dict[str, bool]
) -> dict[str, Tensor | None]:
    x, t, weight, scales, a, b, seed = ctx.saved_tensors
    dy, found = grads["y"], {}
    wanted = {f"want_d{name}": needs[name] for name in ("x", "a", "b")}
    if any(wanted.values()):
        gradients = torch.ops.headroom.lora_linear_backward(
            dy, x, t, weight, scales, a, b, seed, ctx.cols, **ctx.numbers, **wanted
        )
        found = dict(zip(("x", "a", "b"), gradients))
    if needs["bias"]:
        found["bias"] = dy.sum_to_size(dy.shape[-1:])
    return found


def _flops(x, a, rows, **_) -> int:
    tokens, (rank, cols) = prod(x[:-1]), a
    return 2 * tokens * (rows * cols + rank * (rows + cols))


def _backward_flops(dy, a, want_dx, want_da, want_db, **_) -> int:
    *leading, rows = dy
    rank, cols = a
    per_token = rows * cols + rank * cols if want_dx else 0
    per_token += rank * rows * ((want_dx or want_da) + want_db) + rank * cols * want_da
    return 2 * prod(leading) * per_token


differentiable("lora_linear", fake=_fake, save=_save, backward=_backward, flops=_flops)
refuse_derivative("lora_linear_backward", fake=_fake_backward)
register_flops("lora_linear_backward", _backward_flops)
register_fake("lora_norms", _fake_norms)
complete("lora_norms")
