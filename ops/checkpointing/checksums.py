"""Checksums of tensors, a number per block of bytes, computed where the tensor lies.

A checksum is a weighted sum of a block's words, modulo 2 ** 64. Equal bits give equal sums; bits
that differ give other sums but for coincidences. The weights are powers of an odd number, so that
the same words in another order have another sum. In a whole block each 32 words share a weight,
since products of all words with weights of their own would take as much memory as the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["BLOCK_BYTES", "checksums", "first_difference"]

BLOCK_BYTES = 8192

ROW = 32  # words of a whole block that share a weight
FACTOR = 6364136223846793005  # Knuth's for MMIX; its powers repeat after 2 ** 62 only

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
        x = x.detach().resolve_neg()
        flat = _in_memory_order(x.conj() if x.is_conj() else x)  # which is the memory as it is
        if flat.dtype == torch.bool or flat.is_complex() or flat.element_size() not in _WORDS:
            flat = flat.view(torch.uint8)
        size = flat.element_size()
        aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
        words = flat.view(torch.int64 if aligned else _WORDS[size])
        block = BLOCK_BYTES // words.element_size()
        whole = words.numel() // block * block
        rows = words[:whole].view(-1, block // ROW, ROW).sum(2, dtype=torch.int64)
        sums = [(rows * _weights(block // ROW, x.device)).sum(1)]
        if whole < words.numel():
            rest = words[whole:].long()
            sums.append((rest * _weights(rest.numel(), x.device)).sum(0, keepdim=True))
        return torch.cat(sums)


def _weights(count: int, device: torch.device) -> Tensor:
    return torch.full((count,), FACTOR, dtype=torch.int64, device=device).cumprod(0)


def first_difference(was: Tensor, now: Tensor) -> int | None:
    """Returns the number of the first block in which two tensors of checksums differ, or None.

    Waits for the device.
    """
    differs = was != now
    return int(differs.int().argmax()) if bool(differs.any()) else None
