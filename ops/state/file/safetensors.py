"""Reads and writes plain safetensors files, which have no checksums. Tensors are read one at a
time, into memory of their own."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._core.atomic import replacing
from ..._core.text import quoted
from .layout import DTYPES, LONGEST_HEADER, MALFORMED, MOST_DIMS, NAMES
from .tensors import check_tensor, in_index_order, memory_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Entry(NamedTuple):
    """Says where a tensor lies."""

    path: str
    start: int  # in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Returns how many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize


def entries_in(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> dict[str, Entry]:
    """Returns the tensors of files by name, in the order of their places. Reads headers only.

    Args:
        files: a safetensors file, its index (``.json``), a folder with either as transformers names
            them, or several of these.

    Raises:
        OSError: a file cannot be read.
        TypeError: ``files`` are no paths.
        ValueError: a file is malformed or cut off, tensors in it overlap, or a name is in two
            files.
    """
    kinds = str, bytes, os.PathLike
    several = [files] if isinstance(files, kinds) or not isinstance(files, Iterable) else [*files]
    for given in several:
        if not isinstance(given, kinds):
            raise TypeError(f"files is {files!r}, wanted a path of a file or a folder, or several")
    found: dict[str, Entry] = {}
    for path in (one for given in several for one in _paths(os.fsdecode(given))):
        for name, entry in _header(path):
            if name in found:
                raise ValueError(f"'{name}' is in {found[name].path} and in {path}")
            found[name] = entry
    return found


def read(entry: Entry, room: Tensor | None = None) -> Tensor:
    """Returns a tensor on the CPU, in memory of its own or at the beginning of ``room``, of bytes.

    Raises:
        ValueError: the file is shorter than its header said.
    """
    if room is None:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
    else:
        tensor = room[: entry.size].view(entry.dtype).view(entry.shape)
    if not tensor.nbytes:
        return tensor
    memory, done = memory_of(tensor), 0
    with open(entry.path, "rb", buffering=0) as file:
        while done < tensor.nbytes:
            count = os.preadv(file.fileno(), [memory[done:]], entry.start + done)
            if not count:
                raise ValueError(f"{entry.path} ends before its tensors do")
            done += count
    return tensor


def write_plain(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, which appears whole or not at all.

    Raises:
        OSError: the system refuses.
        TypeError, ValueError: safetensors files do not hold such a tensor.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
        offsets = [place, place := place + tensor.numel() * tensor.element_size()]
        shape = [*tensor.shape]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with replacing(path, 8 + len(text) + place) as number:
        with open(number, "wb", closefd=False) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors.values():
                if tensor.numel():
                    file.write(memory_of(held := in_index_order(tensor)))
                    del held


def _paths(path: str) -> list[str]:
    """Returns the files of tensors that a path leads to."""
    if os.path.isdir(path):
        inside = [os.path.join(path, name) for name in (INDEX, SINGLE)]
        path = next((one for one in inside if os.path.exists(one)), inside[-1])
    if not path.endswith(".json"):
        return [path]
    with open(path, encoding="utf-8") as file:
        try:
            index = json.load(file)
        except MALFORMED as error:
            raise ValueError(f"{path} is malformed: {quoted(error)}") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
        raise ValueError(f"{path} has no 'weight_map' of names to files")
    folder = os.path.dirname(path)
    return [os.path.join(folder, name) for name in dict.fromkeys(places.values())]


def _header(path: str) -> Iterator[tuple[str, Entry]]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
        if length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file, or it is cut off")
        text = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        found = [(name, _entry(path, 8 + length, size, one)) for name, one in entries.items()]
    except MALFORMED as error:
        raise ValueError(f"the header of {path} is malformed: {quoted(error)}") from error
    found.sort(key=lambda item: (item[1].start, item[1].size))
    for (first, one), (second, other) in pairwise(found):
        if one.start + one.size > other.start:
            raise ValueError(f"'{quoted(first)}' and '{quoted(second)}' overlap in {path}")
    yield from found


def _entry(path: str, data: int, size: int, fields: dict[str, Any]) -> Entry:
    start, stop = fields["data_offsets"]
    entry = Entry(path, data + start, DTYPES[fields["dtype"]], tuple(fields["shape"]))
    numbers = (start, stop, *entry.shape)
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{numbers} are no sizes and offsets")
    if len(entry.shape) > MOST_DIMS or entry.size != stop - start or data + stop > size:
        raise ValueError(f"{stop - start:,} bytes from {start:,} of shape {entry.shape}")
    return entry
