"""Checksums of tensors, a number per block of bytes, computed where the tensor lies.

A checksum is a weighted sum of a block's words, modulo 2 ** 64. Equal bits give equal sums; bits
that differ give other sums but for coincidences of one in 2 ** 30 or less. The weights are powers
of an odd number, so that the same words in another order have another sum. Before a word is
weighted, its upper bits are mixed into its lower ones: an even number of flipped signs, which are
the highest bits, would otherwise add up to a multiple of 2 ** 64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK_BYTES = 8192

SHIFT = 29  # of the upper bits: a sign comes to lie below the middle of the word
# Blocks whose words are mixed in memory of their own, which stays in the cache of a processor.
AT_A_TIME = 256
AT_A_TIME_ON_A_DEVICE = 4096  # where every group is a handful of launches
FACTOR = 6364136223846793005  # Knuth's for MMIX; its powers repeat after 2 ** 62 only

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _in_memory_order(x: Tensor) -> Tensor:
    """Returns the elements of a tensor, each once, in one dimension; a copy only if they have
    gaps."""
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
    return sums_of(x)


def sums_of(x: Tensor) -> Tensor:
    """Returns the checksums of a tensor whose layout is strided, or, of a fake, a fake of them."""
    with torch.no_grad():
        flat = _in_memory_order(x.detach().resolve_conj().resolve_neg())
        if flat.dtype == torch.bool or flat.is_complex() or flat.element_size() not in _WORDS:
            flat = flat.view(torch.uint8)
        size = flat.element_size()
        aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
        words = flat.view(torch.int64 if aligned else _WORDS[size])
        block = BLOCK_BYTES // words.element_size()
        whole = words.numel() // block * block
        weights = torch.full((block,), FACTOR, device=x.device).cumprod(0)
        count = AT_A_TIME if x.device.type == "cpu" else AT_A_TIME_ON_A_DEVICE
        sums = [_sums(rows, weights) for rows in words[:whole].view(-1, block).split(count)]
        if whole < words.numel():
            tail = words[whole:].unsqueeze(0)
            sums.append(_sums(tail, weights[: tail.numel()]))
        return torch.cat(sums)


def _sums(rows: Tensor, weights: Tensor) -> Tensor:
    rows = rows.long()
    mixed = rows >> SHIFT
    mixed ^= rows
    mixed *= weights
    return mixed.sum(1)


def first_difference(was: Tensor, now: Tensor) -> int | None:
    """Returns the number of the first block in which two tensors of checksums differ, or None.

    Waits for the device.
    """
    differs = was != now
    return int(differs.int().argmax()) if bool(differs.any()) else None
