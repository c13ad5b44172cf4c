"""Multiplies matrices, with gradients: ``headroom::gemm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_flags
from .._core.registration import FLOATS, complete, differentiable, register_fake, require
from .._core.rows import autocast, autocast_dtype, cast, check_tensors
from .._core.surroundings import constant_in_graphs


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns ``alpha * op(a) @ op(b) + beta * c + bias``, summed in float32 and rounded once.

    Gives gradients of a, b, c and bias, by products of its own, so that they can be differentiated
    again. Under autocast, tensors are cast as ``torch.matmul`` casts them.

    Args:
        a: float32, bfloat16 or float16 ``[m, k]``, or ``[batch, m, k]``. Transposed and expanded
            views are read where they lie.
        b: of the same dtype, ``[k, n]`` or ``[batch, k, n]``.
        transpose_a, transpose_b: whether ``a`` is ``[k, m]``, and ``b`` is ``[n, k]``.
        alpha, beta: factors; a ``beta`` of 0 does not read ``c``.
        c: of the shape and dtype of the result; it is not written.
        bias: ``[n]``, of the dtype of the result.
        out_dtype: of the result: that of ``a``, which is the default, or float32.

    Returns:
        A contiguous tensor ``[m, n]`` or ``[batch, m, n]``.

    Raises:
        ValueError: ``out_dtype`` is neither.
        RuntimeError: another argument does not fit, or a CUDA tensor was given and there is no
            cuBLASLt.

    On CUDA it follows ``torch.backends.cuda.matmul`` and ``torch.use_deterministic_algorithms``;
    whatever these say, it repeats itself bit for bit.
    The formula is documented at ``hr_gemm`` in ``headroom.h``.
    """
    check_tensors(a=a, b=b)
    check_flags(transpose_a=transpose_a, transpose_b=transpose_b)
    device = a.device.type
    if autocast_dtype(device) is not None:
        a, b = autocast(a, b)
        c, bias = cast(out_dtype or a.dtype, c, bias)
    if out_dtype not in (None, a.dtype, torch.float32):
        wanted = "torch.float32" if a.dtype == torch.float32 else f"{a.dtype} or torch.float32"
        raise ValueError(f"out_dtype is {out_dtype}, wanted {wanted}")
    return torch.ops.headroom.gemm(
        a,
        b,
        c,
        bias,
        transpose_a,
        transpose_b,
        alpha,
        beta if c is not None else 0.0,
        out_dtype == torch.float32,
        matmul_precision(a.dtype) if device == "cuda" else 0,
    )


def gemm_into(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    beta: float = 0.0,
    bias: Tensor | None = None,
) -> None:
    """Writes ``op(a) @ op(b) + beta * c + bias`` into ``c``, for matrices; without a derivative.

    ``c`` is ``[m, n]``, float32 or of the dtype of ``a``; its rows are dense, and may have gaps
    between them. A ``beta`` of 0 does not read it. The rest is as in :func:`gemm`.
    """
    precision = matmul_precision(a.dtype) if a.device.type == "cuda" else 0
    torch.ops.headroom.gemm_(c, a, b, bias, transpose_a, transpose_b, 1.0, beta, precision)


def matmul_precision(dtype: torch.dtype) -> int:
    """Returns what torch's settings allow cuBLAS, as the bits that the op takes."""
    matmul = torch.backends.cuda.matmul
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    setting = f"allow_{short}_reduced_precision_reduction"
    whole = torch.are_deterministic_algorithms_enabled()  # whether no sum may be split
    if short is not None:
        whole = whole or not getattr(matmul, setting + "_split_k")
    return (
        (dtype == torch.float32 and _allows_tf32())
        + 2 * (short is not None and getattr(matmul, setting))
        + 4 * whole
    )


# torch.compile cannot trace how torch reads this setting, and guards what it compiles by it anyway.
@constant_in_graphs
def _allows_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _sizes(x: Any, transpose: bool) -> tuple:
    """Returns the batch, rows and columns of op(x)."""
    *batch, rows, cols = x
    return (batch, cols, rows) if transpose else (batch, rows, cols)


def _fake(a, b, c, bias, transpose_a, transpose_b, float32_out, **_):
    for name, x in (("a", a), ("b", b)):
        require(x.dim() in (2, 3), f"{name} has {x.dim()} dimensions, wanted 2 or 3")
    require(a.dtype in FLOATS, f"a has dtype {a.dtype}, wanted one of {FLOATS}")
    require(a.dtype == b.dtype, f"b has dtype {b.dtype}, but a has {a.dtype}")
    batch, m, k = _sizes(a.shape, transpose_a)
    other_batch, other_k, n = _sizes(b.shape, transpose_b)
    require(
        batch == other_batch and k == other_k,
        f"a and b do not fit: op(a) is {[*batch, m, k]}, op(b) is {[*other_batch, other_k, n]}",
    )
    out = a.new_empty((*batch, m, n), dtype=torch.float32 if float32_out else a.dtype)
    if c is not None:
        require(
            c.shape == out.shape and c.dtype == out.dtype,
            "c must have the sizes, dtype and device of the result",
        )
    if bias is not None:
        require(
            bias.dim() == 1 and bias.shape[0] == n and bias.dtype == out.dtype,
            f"bias must be a tensor [{n}] with the dtype and device of the result",
        )
    return out


def _fake_into(c, **given):
    out = _fake(c=None, float32_out=c.dtype == torch.float32, **given)
    require(c.shape == out.shape and c.dim() == 2, f"c is {[*c.shape]}, wanted {[*out.shape]}")
    require(c.dtype == out.dtype, f"c has dtype {c.dtype}, wanted float32 or that of a")


def _save(ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
    needs_a, needs_b, *_ = ctx.needs_input_grad
    ctx.save_for_backward(given["a"] if needs_b else None, given["b"] if needs_a else None)
    ctx.numbers = {n: x for n, x in given.items() if n not in ("a", "b", "c", "bias")}
    ctx.dtype = given["a"].dtype


def _backward(
    ctx: Any, grads: dict[str, Tensor], needs: dict[str, bool]
) -> dict[str, Tensor | None]:
    a, b = ctx.saved_tensors
    (grad,) = grads.values()
    turned_a, turned_b = ctx.numbers["transpose_a"], ctx.numbers["transpose_b"]
    found: dict[str, Tensor | None] = {}
    g = grad.to(ctx.dtype)

    def product(x: Tensor, y: Tensor, transpose_x: bool, transpose_y: bool) -> Tensor:
        own = {"transpose_a": transpose_x, "transpose_b": transpose_y}
        numbers = ctx.numbers | own | {"beta": 0.0, "float32_out": False}
        return torch.ops.headroom.gemm(x, y, None, None, **numbers)

    if needs["a"]:
        found["a"] = (
            product(b, g, turned_b, True) if turned_a else product(g, b, False, not turned_b)
        )
    if needs["b"]:
        found["b"] = (
            product(g, a, True, turned_a) if turned_b else product(a, g, not turned_a, False)
        )
    if needs["c"]:
        found["c"] = grad * ctx.numbers["beta"]
    if needs["bias"]:
        found["bias"] = grad.sum(tuple(range(grad.dim() - 1)))
    return found


def _flops(a, b, transpose_a, transpose_b, **_) -> int:
    batch, m, k = _sizes(a, transpose_a)
    _, _, n = _sizes(b, transpose_b)
    return 2 * m * n * k * (batch[0] if batch else 1)


differentiable("gemm", fake=_fake, save=_save, backward=_backward, flops=_flops)
register_fake("gemm_", _fake_into)
complete("gemm_")
