"""Slabs in files: mapped for those who look into them, read and written by copies, which leave no
pages of them in the process."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class MappedFile(mmap.mmap):
    """A mapping of a file without a name, which vanishes with it."""

    file: Any


def mapped_file(size: int, folder: Path) -> MappedFile:
    """Returns a mapping of a new file.

    Raises:
        OSError: the file cannot be made, or the disk has no room for it.
    """
    file = tempfile.TemporaryFile(dir=folder)
    os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a signal
    mapping = MappedFile(file.fileno(), size, flags=mmap.MAP_SHARED)
    mapping.file = file
    return mapping


_slabs: dict[int, MappedFile] = {}  # by their addresses


def copied_through_file(slab: Tensor, mapping: MappedFile) -> Callable[[], None]:
    """Lets copies from and to a slab go through its file. Returns what ends that."""
    address = slab.data_ptr()
    _slabs[address] = mapping

    def end() -> None:
        _slabs.pop(address, None)

    return end


def _mapping_of(tensor: Tensor) -> MappedFile | None:
    if not _slabs or isinstance(tensor, FakeTensor):
        return None
    return _slabs.get(tensor.untyped_storage().data_ptr())


def copy_through_file(target: Tensor, source: Tensor) -> bool:
    """Copies bytes from or to a slab by reading or writing its file. Returns False, and copies
    nothing, where there is none."""
    for call, place, other in ((os.preadv, source, target), (os.pwritev, target, source)):
        if (mapping := _mapping_of(place)) is not None:
            memory, first, done = memoryview(other.numpy()), place.storage_offset(), 0
            while done < len(memory):  # the system copies at most 2 GiB at once
                done += call(mapping.file.fileno(), [memory[done:]], first + done)
            return True
    return False


def let_pages_go(tensor: Tensor) -> None:
    """Takes the pages of a slab in a file out of the process. The file has what is in them, and
    they come back where somebody looks at them."""
    mapping = _mapping_of(tensor)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
