"""Checksums of tensors, a number per block of bytes, computed where the tensor lies.

A checksum is the sum of a block's words, modulo 2 ** 64. Equal bits give equal sums; bits that
differ give other sums but for coincidences, among them the same words in another order within a
block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["BLOCK_BYTES", "checksums", "first_difference"]

BLOCK_BYTES = 8192

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _in_memory_order(x: Tensor) -> Tensor:
    """The elements of a tensor, each once, in one dimension; a copy only if they have gaps."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    if x.numel() > 0 and not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), x.shape[dim])))
    return x.contiguous().view(-1)


def checksums(x: Tensor) -> Tensor | None:
    """Returns int64 ``[ceil(bytes / BLOCK_BYTES)]`` on the device of ``x``, with one read of it.

    None for a tensor whose bytes are not to be had: sparse, fake or on the meta device.
    """
    if isinstance(x, DTensor):
        x = x.to_local()
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_meta:
        return None
    with torch.no_grad():
        flat = _in_memory_order(x.detach())
        if flat.dtype == torch.bool or flat.is_complex() or flat.element_size() not in _WORDS:
            flat = flat.view(torch.uint8)
        size = flat.element_size()
        aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
        words = flat.view(torch.int64 if aligned else _WORDS[size])
        block = BLOCK_BYTES // words.element_size()
        whole = words.numel() // block * block
        sums = [words[:whole].view(-1, block).sum(1, dtype=torch.int64)]
        if whole < words.numel():
            sums.append(words[whole:].sum(0, keepdim=True, dtype=torch.int64))
        return torch.cat(sums)


def first_difference(was: Tensor, now: Tensor) -> int | None:
    """Returns the number of the first block in which two tensors of checksums differ, or None.

    Waits for the device.
    """
    differs = was != now
    return int(differs.int().argmax()) if bool(differs.any()) else None
