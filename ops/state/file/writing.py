"""Writes state files."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor
from tqdm import tqdm

from ..._core.atomic import BusyFileError, replacing
from ..._core.progress import progress_bar
from . import layout
from .header import check_readable, header_of
from .layout import StateFileError
from .tensors import check_tensor, in_index_order


def write(
    path: str, document: dict[str, Any], tensors: dict[str, Tensor], *, progress: bool = True
) -> None:
    """Writes a state file beside ``path`` and then renames it, as one step that has happened or
    not, whatever fails. At no time is more copied than one tensor and some pieces.

    Raises:
        OSError: the system refuses, or what is at ``path`` is not a file; the message says what
            became of the old file and what to do.
        StateFileError: another process or thread is writing this file.
        TypeError: a tensor is of a kind that no file holds.
        ValueError: too many tensors or values, or a tensor whose memory has been freed.
    """
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
    # Larger elements first: every tensor is then aligned to its elements. Detached, so that a
    # thread that gives a parameter another tensor meanwhile does not change this one.
    tensors = {
        name: tensor.detach()
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size())
    }
    sums = {name: [0] * -(-tensor.nbytes // layout.PIECE) for name, tensor in tensors.items()}
    header = header_of(document, tensors, sums, 0)
    _check_header(header, len(tensors))
    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    try:
        with replacing(path, size) as file:
            _write_all(file, path, document, tensors, sums, len(header), progress)
    except BusyFileError as error:
        raise StateFileError(str(error)) from None


def _check_header(header: bytes, tensors: int) -> None:
    if len(header) > layout.LONGEST_HEADER:
        raise ValueError(
            f"{tensors:,} tensors make a header of {len(header):,} bytes, and a safetensors "
            f"file allows {layout.LONGEST_HEADER:,}; save the parts in several files"
        )
    try:
        check_readable(header)
    except ValueError as error:
        raise ValueError(
            f"the header would not be read again: {error}; save long lists of numbers as "
            "tensors, and the parts in several files"
        ) from None


def _write_all(
    file: int,
    path: str,
    document: dict[str, Any],
    tensors: dict[str, Tensor],
    sums: dict[str, list[int]],
    start: int,
    progress: bool,
) -> None:
    """Writes the tensors from byte ``start`` on, and then the header with their sums before it."""
    sequence = next_sequence(os.path.dirname(os.path.realpath(path)))
    size = start + sum(tensor.nbytes for tensor in tensors.values())
    bar = progress_bar(size, f"saving {os.path.basename(path)}", unit="B", shown=progress)
    with bar, ThreadPoolExecutor(layout.threads()) as pool:
        copier = _Copier(file, pool, bar)
        for name, tensor in tensors.items():
            sums[name] = copier.write(start, tensor)
            start += tensor.nbytes
    _write(file, 0, memoryview(header_of(document, tensors, sums, sequence)))


def next_sequence(folder: str) -> int:
    """Returns a number higher than that of any state file in a folder."""
    highest = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                highest = max(highest, _stored_sequence(entry.path))
    return min(highest + 1, 10**layout.SEQUENCE_DIGITS - 1)


def _stored_sequence(path: str) -> int:
    """Returns the number in a header without a look at its checksum: a number that is too high does
    no harm here, and every file of the folder is asked."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb", buffering=0) as file:
                found = layout.BEGINNING.match(file.read(100))
                return int(found[1]) if found else 0
    return 0


class _Copier:
    """Writes tensors from copies of their pieces, and sums the copies, so that the checksums are
    those of what is written also while another thread changes the tensor. Threads copy and sum the
    next pieces while one is written."""

    def __init__(self, file: int, pool: ThreadPoolExecutor, bar: tqdm) -> None:
        self._file, self._pool, self._bar = file, pool, bar
        self._free: list[Any] = []
        self._ahead = min(layout.threads(), 3)

    def write(self, offset: int, tensor: Tensor) -> list[int]:
        """Writes the values and returns the sums of their pieces."""
        if not tensor.nbytes:
            return []
        piece = layout.PIECE
        values = in_index_order(tensor)  # held until all of it is copied
        start, stop = values.data_ptr(), values.data_ptr() + values.nbytes
        sums: list[int] = []
        ahead: deque[Future[tuple[Any, memoryview, int]]] = deque()
        try:
            for address in range(start, stop, piece):
                ahead.append(self._copied(address, min(piece, stop - address)))
                if len(ahead) > self._ahead:
                    sums.append(self._written(offset + len(sums) * piece, ahead.popleft()))
            while ahead:
                sums.append(self._written(offset + len(sums) * piece, ahead.popleft()))
        finally:
            wait(ahead)
            del values
        return sums

    def _copied(self, address: int, size: int) -> Future[tuple[Any, memoryview, int]]:
        buffer = (self._free or [(ctypes.c_char * min(size, layout.PIECE))()]).pop()
        if len(buffer) < size:
            buffer = (ctypes.c_char * size)()
        if size > layout.SMALL:
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end, as in atexit
                return self._pool.submit(_copy, buffer, address, size)
        future: Future[tuple[Any, memoryview, int]] = Future()
        future.set_result(_copy(buffer, address, size))
        return future

    def _written(self, offset: int, future: Future[tuple[Any, memoryview, int]]) -> int:
        buffer, copy, crc = future.result()
        _write(self._file, offset, copy)
        self._bar.update(len(copy))
        self._free.append(buffer)
        return crc


def _copy(buffer: Any, address: int, size: int) -> tuple[Any, memoryview, int]:
    """Copies the bytes at an address to a buffer. Returns the buffer, its part that holds them, and
    their sum."""
    copy, crc = memoryview(buffer).cast("B")[:size], 0
    for start in range(0, size, layout.BLOCK):
        block = copy[start : start + layout.BLOCK]
        ctypes.memmove(ctypes.addressof(buffer) + start, address + start, len(block))
        crc = layout.crc32(block, crc)
    return buffer, copy, crc


def _write(file: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count
