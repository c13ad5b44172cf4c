"""Holds 8-bit moments: a code for each element, and a scale for each block of elements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..._core.overlap import is_dense
from ...functional.dynamic_map import dynamic_map
from ...functional.quantize_blocks import quantize_blocks

PIECE = 2**20  # elements worked on at a time


@dataclass
class Codes:
    """Holds a moment in 8 bits: a code per element, a scale per block in memory order."""

    codes: Tensor  # uint8
    absmax: Tensor  # float32, flat
    block_size: int
    is_signed: bool

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(f"has blocks of {shown(self.block_size)} elements, wanted 1 or more")
        blocks = -(-self.codes.numel() // self.block_size)
        if self.absmax.numel() != blocks or self.codes.dtype != torch.uint8:
            raise ValueError(
                f"has {self.absmax.numel()} scales and codes of {self.codes.dtype}, wanted "
                f"{blocks} and torch.uint8"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def clone(self) -> Codes:
        return replace(self, codes=self.codes.clone(), absmax=self.absmax.clone())

    def decode(self) -> Tensor:
        codes = flattened(self.codes)
        values = dynamic_map(self.is_signed).to(codes.device)
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for part, blocks in pieces(codes.numel(), self.block_size):
            scales = self.absmax[blocks].repeat_interleave(self.block_size)
            part_codes = codes[part].int()
            out[part] = values.index_select(0, part_codes) * scales[: part_codes.numel()]
        return unflattened(out, self.codes)


def encode(moment: Tensor, block_size: int, is_signed: bool) -> Codes:
    """Returns the codes and scales that the kernels store for a moment: see ``hr_adamw8bit`` in
    ``headroom.h``."""
    codes, absmax = quantize_blocks(moment.float(), is_signed=is_signed, block_size=block_size)
    return Codes(codes, absmax, block_size, is_signed)


def codes_of(
    moment: Tensor | Codes, block_size: int, is_signed: bool, any_order: bool = False
) -> Codes:
    """Returns a moment as codes in blocks of one size. Keeps codes that are in such blocks already.
    With ``any_order`` they may be in any order of memory."""
    if (
        isinstance(moment, Codes)
        and moment.block_size == block_size
        and (any_order or moment.codes.is_contiguous())
    ):
        return moment
    value = floats_of(moment)
    codes = encode(value if any_order else value.contiguous(), block_size, is_signed)
    if not are_scales(codes.absmax):
        raise ValueError("has a moment that is not finite, which 8 bits cannot hold")
    return codes


def floats_of(moment: Tensor | Codes) -> Tensor:
    """Returns a moment as numbers."""
    return moment.decode() if isinstance(moment, Codes) else moment


def are_scales(numbers: Tensor) -> bool:
    """Returns whether all numbers are finite and not negative."""
    if not numbers.numel():
        return True
    low, high = (number.item() for number in torch.aminmax(numbers))  # a NaN spreads to both
    return low >= 0 and high < math.inf


def check_map(values: Tensor, is_signed: bool) -> None:
    """Refuses codes whose map is not Headroom's: bitsandbytes 0.36 to 0.41 had others."""
    if not torch.equal(values.cpu(), dynamic_map(is_signed)):
        raise ValueError(
            "has 8-bit codes of another map, as bitsandbytes 0.36 to 0.41 had; load the state with "
            "that release, and go on in 32 bits"
        )


def pieces(numel: int, block_size: int) -> Iterable[tuple[slice, slice]]:
    """Yields slices of the elements, and of their blocks, that are worked on together."""
    step = max(1, PIECE // block_size)
    for first in range(0, -(-numel // block_size), step):
        elements = slice(first * block_size, min(numel, (first + step) * block_size))
        yield elements, slice(first, first + step)


def flattened(tensor: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in memory order, else in the order of the indices."""
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def unflattened(flat: Tensor, like: Tensor) -> Tensor:
    """Returns the inverse of :func:`flattened`."""
    return flat.as_strided(like.shape, like.stride()) if is_dense(like) else flat.view(like.shape)


def shown(value: Any) -> str:
    """Returns a value for a message. A long value, or one without memory, is shown by its type."""
    is_short = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return repr(value) if is_short else f"a {type(value).__name__}"
