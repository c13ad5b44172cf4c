"""Quantizes matrices to 4 or 8 bits, and back: the ops ``headroom::quantize_matrix`` and
``headroom::dequantize_matrix``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.registration import FLOATS, complete, require
from .._core.rows import check_tensors

FORMATS = {"nf4": 1, "fp4": 2, "int8": 3}  # numbers of hr_format
BLOCK_SIZES = tuple(2**k for k in range(5, 13))  # of 4 bits
MXFP4, MX_BLOCK = "mxfp4", 32  # which is only read
_NUMBERS = FORMATS | {MXFP4: 4}
_NAMES = {number: name for name, number in _NUMBERS.items()}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of 4 or 8 bits per element, as bitsandbytes stores it.

    Attributes:
        codes: 4 bits: uint8 ``[(rows * cols + 1) // 2, 1]``, two elements per byte, the first in
            its upper half. ``"int8"``: int8 ``[rows, cols]``.
        scales: uint8, the bytes of float32 scales: one per block of ``block_size`` elements in row
            order, or per row for ``"int8"``. If they are ``nested``: one code per block, zeros up
            to a multiple of 4 bytes, float32 scales of 256 of these each, and a float32 offset.
        shape: ``(rows, cols)``, or ``(count, rows, cols)`` of a stack.
        dtype: of the matrix before, and of what :func:`dequantize_matrix` returns.
        format: ``"nf4"``, ``"fp4"``, ``"int8"`` or ``"mxfp4"``.
        block_size: elements per scale; not used by ``"int8"``.
        nested: whether scales are quantized too.

    In ``"mxfp4"``, as files of gpt-oss have it, codes have any shape, the first of two elements is
    in the lower half of its byte, and scales are an exponent per block of 32, which stands for
    ``2 ** (exponent - 127)``.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: str
    block_size: int
    nested: bool


def quantize_matrix(
    x: Tensor, to: str = "nf4", block_size: int = 64, double: bool = True, search: bool = False
) -> QuantizedMatrix:
    """Returns a matrix in 4 or 8 bits per element.

    ``"nf4"`` (Dettmers et al., arXiv:2305.14314) takes 4.13 bits with ``double``, else 4.5;
    ``"int8"`` (arXiv:2208.07339) takes 8, and a scale per row. Codes are those of bitsandbytes, and
    so are scales, but for about one in 500 with ``double``, which it rounds more coarsely on a CPU;
    in FP4 its kernels differ from each other in the middle between two codes. Either reads the
    files of the other.

    Args:
        x: float32, bfloat16 or float16 ``[rows, cols]``.
        to: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        block_size: elements per scale: a power of two from 32 to 4096. Blocks go on from row to
            row.
        double: quantize the scales, too. ``"int8"`` has few, which stay float32.
        search: choose each block's scale, of 8, for the least squared error: about 0.87 of the mean
            squared error, in 8 times the time. bitsandbytes reads the result as any other.

    Raises:
        RuntimeError: an argument does not fit.
        TypeError: ``x`` is no tensor.
        ValueError: ``to`` is not a format, or is ``"mxfp4"``, which is only read:
            :func:`mxfp4_matrix`.

    A NaN makes its block NaN; nothing is refused. The rule is documented at ``hr_quantize_matrix``
    in ``headroom.h``.
    """
    check_tensors(x=x)
    if to == MXFP4:
        raise ValueError(
            "to is 'mxfp4', which is only read: give mxfp4_matrix() the blocks and scales of a "
            "checkpoint"
        )
    if to not in [*FORMATS]:
        raise ValueError(f"to is {to!r}, wanted one of {', '.join(map(repr, FORMATS))}")
    nested = double and to != "int8"
    codes, scales = torch.ops.headroom.quantize_matrix(x, FORMATS[to], block_size, nested, search)
    return QuantizedMatrix(codes, scales, tuple(x.shape), x.dtype, to, block_size, nested)


def mxfp4_matrix(
    blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16
) -> QuantizedMatrix:
    """Returns a matrix, or a stack of them, that shares the memory of a checkpoint's tensors in
    MXFP4 (OCP Microscaling Formats v1.0).

    Each element takes 4.25 bits, and decodes to bfloat16 and float32 without an error. Rows are
    those of the checkpoint, the outputs of a layer; transformers transposes them when it decodes.

    Args:
        blocks: uint8 ``[..., rows, cols // 32, 16]``, such as ``gate_up_proj_blocks`` of gpt-oss.
        scales: uint8 ``[..., rows, cols // 32]``, such as ``gate_up_proj_scales``.
        dtype: of what :func:`dequantize_matrix` returns: float32, bfloat16 or float16.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: blocks and scales are no uint8 of these shapes.
    """
    check_tensors(blocks=blocks, scales=scales)
    wanted = (*scales.shape, MX_BLOCK // 2)
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks are {blocks.dtype} and scales {scales.dtype}, wanted uint8")
    if scales.dim() not in (2, 3) or blocks.shape != wanted:
        raise ValueError(
            f"blocks have shape {[*blocks.shape]} and scales {[*scales.shape]}, wanted "
            "[..., rows, cols // 32, 16] and [..., rows, cols // 32]"
        )
    shape = (*scales.shape[:-1], scales.shape[-1] * MX_BLOCK)
    return QuantizedMatrix(blocks, scales, shape, dtype, MXFP4, MX_BLOCK, False)


def dequantize_matrix(q: QuantizedMatrix, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the elements of a matrix or a stack, of its shape: the float32 product of a code's
    value and its scale, rounded to ``dtype``.

    Args:
        q: a matrix or a stack from :func:`quantize_matrix`.
        dtype: float32, bfloat16 or float16; None: ``q.dtype``.

    Raises:
        RuntimeError: codes or scales do not fit the shape.
        TypeError: ``q`` is no such matrix.
    """
    check_matrix("q", q)
    *rows, cols = q.shape
    return torch.ops.headroom.dequantize_matrix(
        q.codes,
        q.scales,
        prod(rows),
        cols,
        *layout_of(q),
        q.dtype if dtype is None else dtype,
    ).view(q.shape)


def check_matrix(name: str, q: Any) -> None:
    """Raises where an argument that must be a matrix of few bits is something else."""
    if not isinstance(q, QuantizedMatrix):
        got = "None" if q is None else f"a {type(q).__name__}"
        raise TypeError(f"{name} is {got}, wanted a QuantizedMatrix, as from quantize_matrix()")


def layout_of(q: QuantizedMatrix) -> tuple[int, int, bool]:
    """Returns how codes lie, as ops take it: the format, the block size, and whether scales are
    nested."""
    return _NUMBERS[q.format], q.block_size, q.nested


def bytes_of(rows: int, cols: int, format: int, block_size: int, nested: bool) -> tuple[int, int]:
    """Returns how many elements codes have, and how many bytes scales, as the op checks them."""
    require(format in _NAMES, f"format is {format}, wanted 1 (nf4), 2 (fp4), 3 (int8) or 4 (mxfp4)")
    require(rows >= 0 and cols >= 0, f"a matrix has shape [{rows}, {cols}]")
    if _NAMES[format] in ("int8", MXFP4):
        require(not nested, "nested is true, but only the scales of nf4 and fp4 have scales")
    if _NAMES[format] == "int8":
        return rows * cols, 4 * rows
    if _NAMES[format] == MXFP4:
        require(
            block_size == MX_BLOCK and cols % MX_BLOCK == 0,
            f"block_size is {block_size} and a row has {cols} elements, wanted whole blocks of 32 "
            "in mxfp4",
        )
        return rows * cols // 2, rows * cols // MX_BLOCK
    require(
        block_size in BLOCK_SIZES,
        f"block_size is {block_size}, wanted a power of two from 32 to 4096",
    )
    blocks = -(-rows * cols // block_size)
    nested_bytes = -(-blocks // 4) * 4 + 4 * -(-blocks // 256) + 4
    return (rows * cols + 1) // 2, nested_bytes if nested else 4 * blocks


def require_fit(
    codes: Tensor, scales: Tensor, rows: int, cols: int, format: int, block_size: int, nested: bool
) -> None:
    """Raises in a fake what the ops raise of codes and scales that do not fit their matrix."""
    elements, size = bytes_of(rows, cols, format, block_size, nested)
    dtype = torch.int8 if _NAMES[format] == "int8" else torch.uint8
    for name, x, numel, wanted in (
        ("codes", codes, elements, dtype),
        ("scales", scales, size, torch.uint8),
    ):
        require(
            x.dtype == wanted and x.numel() == numel,
            f"{name} has {x.numel()} elements of {x.dtype}, wanted {numel} of {wanted}",
        )
    require(scales.device == codes.device, f"scales is on {scales.device}, codes on {codes.device}")


@torch.library.register_fake("headroom::quantize_matrix")
def _(matrix, format, block_size, nested, search):
    require(matrix.dim() == 2, f"matrix has {matrix.dim()} dimensions, wanted [rows, cols]")
    require(matrix.dtype in FLOATS, f"matrix has dtype {matrix.dtype}, wanted a float")
    require(format != _NUMBERS[MXFP4], "format is 4 (mxfp4), which is only read")
    elements, size = bytes_of(*matrix.shape, format, block_size, nested)
    codes = (
        matrix.new_empty(matrix.shape, dtype=torch.int8)
        if _NAMES[format] == "int8"
        else matrix.new_empty((elements, 1), dtype=torch.uint8)
    )
    return codes, matrix.new_empty(size, dtype=torch.uint8)


@torch.library.register_fake("headroom::dequantize_matrix")
def _(codes, scales, rows, cols, format, block_size, nested, dtype):
    require_fit(codes, scales, rows, cols, format, block_size, nested)
    require(dtype in FLOATS, f"dtype is {dtype}, wanted a float")
    return codes.new_empty((rows, cols), dtype=dtype)


complete("quantize_matrix")
complete("dequantize_matrix")
