"""Quantizes blocks of numbers to 8-bit codes, and back: the ops ``headroom::quantize_blocks`` and
``headroom::dequantize_blocks``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.registration import FLOATS, complete, require

BLOCK_SIZES = tuple(2**k for k in range(6, 13))


def quantize_blocks(
    values: Tensor, *, is_signed: bool, block_size: int = 256
) -> tuple[Tensor, Tensor]:
    """Returns the nearest codes of the dynamic map, and the largest magnitude of each block.

    These are the codes and scales that 8-bit Adam stores for its moments: ``map[code] * absmax``
    with the map of :func:`headroom.functional.dynamic_map`. A positive number never gets the
    unsigned code of zero.

    Args:
        values: float32, bfloat16 or float16, of any shape.
        is_signed: use the map of first moments, in [-1, 1]; else that of second moments, in [0, 1],
            for numbers that are not negative.
        block_size: a power of two from 64 to 4096. Blocks follow the order in memory of a dense
            tensor, else the order of the indices. The last may be short.

    Returns:
        uint8 codes with the shape and strides of ``values`` (contiguous if it is not dense), and
        float32 ``[blocks]``, NaN where a value of the block is not finite.

    Raises:
        RuntimeError: an argument does not fit.

    The rule and its source are documented at ``hr_quantize_blocks`` in ``headroom.h``.
    """
    return torch.ops.headroom.quantize_blocks(values, is_signed, block_size)


def dequantize_blocks(
    codes: Tensor, absmax: Tensor, *, is_signed: bool, block_size: int = 256
) -> Tensor:
    """Returns ``map[code] * absmax`` in float32, with the shape and strides of ``codes``.

    Args:
        codes: uint8, of any shape.
        absmax: float32 ``[blocks]``, contiguous.
        is_signed, block_size: as in :func:`quantize_blocks`.

    Raises:
        RuntimeError: an argument does not fit.
    """
    return torch.ops.headroom.dequantize_blocks(codes, absmax, is_signed, block_size)


def _check_block_size(block_size: int) -> None:
    require(
        block_size in BLOCK_SIZES,
        f"block_size is {block_size}, wanted a power of two from 64 to 4096",
    )


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a new tensor in the memory order of ``like``, or a contiguous one if that is not
    dense."""
    if not torch.ops.aten.is_non_overlapping_and_dense(like):
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)


@torch.library.register_fake("headroom::quantize_blocks")
def _(values, is_signed, block_size=256):
    _check_block_size(block_size)
    require(values.dtype in FLOATS, f"values has dtype {values.dtype}, wanted a float")
    blocks = (values.numel() + block_size - 1) // block_size
    return _empty(values, torch.uint8), values.new_empty(blocks, dtype=torch.float32)


@torch.library.register_fake("headroom::dequantize_blocks")
def _(codes, absmax, is_signed, block_size=256):
    _check_block_size(block_size)
    require(codes.dtype == torch.uint8, f"codes has dtype {codes.dtype}, wanted uint8")
    require(absmax.dtype == torch.float32, f"absmax has dtype {absmax.dtype}, wanted float32")
    require(
        absmax.numel() == (codes.numel() + block_size - 1) // block_size
        and absmax.device == codes.device
        and absmax.is_contiguous(),
        f"absmax must be contiguous, with a scale per {block_size} codes, on {codes.device}",
    )
    return _empty(codes, torch.float32)


complete("quantize_blocks")
complete("dequantize_blocks")
