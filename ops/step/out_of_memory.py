"""Errors that say that memory has run out: what they keep alive, and what else they say."""

from __future__ import annotations

import gc
import traceback

import torch

__all__ = ["add_note", "forget_tensors", "is_out_of_memory"]

# How a RuntimeError says it: torch's allocators, of a device where an op on the stable ABI calls
# it, and of the CPU on Linux and elsewhere, C++, the CUDA runtime, and CUDA's libraries, which
# allocate beside torch, such as CUBLAS_STATUS_ALLOC_FAILED.
_WORDS = (
    " out of memory. Tried to allocate ",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory has run out: :class:`torch.OutOfMemoryError`,
    MemoryError, or the RuntimeError of torch's allocator for the CPU, of C++, of CUDA or of one of
    its libraries."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def forget_tensors(error: BaseException) -> None:
    """Frees what an error keeps alive: the local variables of the functions that it went through,
    in which the activations of a step are. Its traceback still shows the lines. Then frees cycles,
    waits for CUDA devices, and gives their cached memory back."""
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        errors += [one.__cause__, one.__context__]
    gc.collect()
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # else waiting would make a context
                # Other streams may still write to what is put back next.
                torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def add_note(error: BaseException, note: str) -> None:
    """Adds text to an error: as a note from Python 3.11 on, else to its message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        first = str(error.args[0]) if error.args else ""
        error.args = (f"{first}\n{note}", *error.args[1:])
