"""Errors that say that memory has run out, and the tensors that they keep alive."""

from __future__ import annotations

import gc
import traceback

import torch

__all__ = ["forget_tensors", "is_out_of_memory"]

# How torch's allocator for the CPU says it, on Linux and elsewhere. It raises a plain RuntimeError.
_CPU = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory has run out: :class:`torch.OutOfMemoryError`,
    MemoryError, or the RuntimeError of torch's allocator for the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU)


def forget_tensors(error: BaseException) -> None:
    """Frees what an error keeps alive: the local variables of the functions that it went through,
    in which the activations of a step are. Its traceback still shows the lines. Then frees cycles,
    and gives cached memory of CUDA devices back."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        rest += [one.__cause__, one.__context__]
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
