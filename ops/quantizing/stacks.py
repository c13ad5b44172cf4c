"""Stacks of matrices of experts in files, which are quantized matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.quantize_blocks import quantize_blocks
from ..functional.quantize_matrix import QuantizedMatrix, quantize_matrix
from ..nn.bitsandbytes import NESTED_BLOCK, is_finite
from ..state.file.safetensors import Entry, read


class Stack(NamedTuple):
    """Says where the matrices of a stack lie.

    Attributes:
        matrices: of each, the tensors whose rows it has one behind the other.
    """

    matrices: tuple[tuple[Entry, ...], ...]

    @classmethod
    def of(cls, entry: Entry) -> Stack:
        """Returns where the matrices of a stack lie that is one tensor of a file."""
        _, *shape = entry.shape
        one = Entry(entry.path, entry.start, entry.dtype, tuple(shape))
        starts = (entry.start + k * one.size for k in range(entry.shape[0]))
        return cls(tuple((one._replace(start=start),) for start in starts))

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices[0][0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.matrices[0]
        return len(self.matrices), sum(part.shape[0] for part in first), *first[0].shape[1:]

    @property
    def size(self) -> int:
        """Returns how many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_of_one(self) -> int:
        """Returns how many bytes a matrix has."""
        return self.size // len(self.matrices)


def read_stack(stack: Stack, room: Tensor | None = None) -> Tensor:
    """Returns the matrices ``[count, rows, cols]`` on the CPU, in memory of their own or at the
    beginning of ``room``, of bytes.

    Raises:
        ValueError: a file is shorter than its header said.
    """
    room = torch.empty(stack.size, dtype=torch.uint8) if room is None else room[: stack.size]
    place = 0
    for part in (part for matrix in stack.matrices for part in matrix):
        read(part, room[place:])
        place += part.size
    return room.view(stack.dtype).view(stack.shape)


def read_whole(entry: Entry | Stack) -> Tensor:
    """Returns a tensor of files, or a stack of them, on the CPU."""
    return read(entry) if isinstance(entry, Entry) else read_stack(entry)


def matrices_at_once(stack: Stack, block_size: int) -> int:
    """Returns how many matrices are quantized together, so that no block of codes of 4 bits crosses
    from them to others: one, but for sizes that no model has."""
    numel = math.prod(stack.shape[1:])
    return min(len(stack.matrices), block_size // math.gcd(numel, block_size))


def quantized_stack(
    stack: Stack,
    to: str,
    *,
    block_size: int,
    double: bool,
    search: bool,
    device: torch.device | str,
    room: Tensor | None = None,
) -> QuantizedMatrix:
    """Returns a stack in few bits as :func:`headroom.functional.quantize_matrix` makes it, without
    holding more of it than a matrix.

    Raises:
        ValueError: an element is not finite, or a file is shorter than its header said.
    """
    count, rows, cols = stack.shape
    form = torch.empty((count * rows, cols), dtype=stack.dtype, device="meta")
    form = quantize_matrix(form, to, block_size, double=False)
    codes = torch.empty_like(form.codes, device=device)
    scales = torch.empty_like(form.scales, device=device)
    place = [0, 0]
    for part in _parts(stack, matrices_at_once(stack, block_size)):
        x = read_stack(part, room).to(device).flatten(0, 1)
        q = quantize_matrix(x, to, block_size, double=False, search=search)
        for k, (whole, piece) in enumerate(((codes, q.codes), (scales, q.scales))):
            whole[place[k] : place[k] + len(piece)] = piece
            place[k] += len(piece)
    nested = double and to != "int8"
    layout: Any = (stack.shape, stack.dtype, to, block_size, nested)
    q = QuantizedMatrix(codes, _nested(scales) if nested else scales, *layout)
    if not is_finite(q):
        raise ValueError("an element is not finite")
    return q


def _parts(stack: Stack, count: int) -> Iterator[Stack]:
    for k in range(0, len(stack.matrices), count):
        yield Stack(stack.matrices[k : k + count])


def _nested(scales: Tensor) -> Tensor:
    """Returns the bytes of quantized scales, by the rule at ``hr_quantize_matrix`` in
    ``headroom.h``, for those of float32 scales."""
    absmax = scales.view(torch.float32)
    offset = absmax.mean(dtype=torch.float64).to(torch.float32)
    codes, rest = quantize_blocks(absmax - offset, is_signed=True, block_size=NESTED_BLOCK)
    zeros = codes.new_zeros(-len(codes) % 4)
    return torch.cat([codes, zeros, rest.view(torch.uint8), offset.view(1).view(torch.uint8)])
