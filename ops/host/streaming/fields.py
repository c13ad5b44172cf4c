"""Says where the parameters of a block lie in the run of bytes that passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Stream = Block = Any  # a Stream and a StreamedBlock, whose files import all others here
ALIGNMENT = 512  # of tensors in a slot; that of what torch allocates on a device


class Field(NamedTuple):
    """Says where a parameter lies in the run of its block.

    Attributes:
        places: the modules that have it, and its names in them.
        first: its first byte.
        shape, stride, dtype: of the tensor.
    """

    places: tuple[tuple[nn.Module, str], ...]
    first: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def of(self, run: Tensor) -> Tensor:
        """Returns a tensor in the memory of a run of bytes, which is no view of it."""
        first = self.first // self.dtype.itemsize
        memory = run.untyped_storage()
        return on_memory(memory, run.device, self.dtype, first, self.shape, self.stride)


def on_memory(
    memory: torch.UntypedStorage,
    device: torch.device,
    dtype: torch.dtype,
    first: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(memory, first, shape, stride)
