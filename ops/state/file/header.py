"""The header of a state file: JSON text with a checksum, written here and parsed here."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import layout
from .tensors import strides_to_keep

DEEPEST = 400  # nested brackets in a header; Python's own limit is 1,000 calls
CHECKSUM = slice(8 + len(layout.PREFIX), 16 + len(layout.PREFIX))  # its place in the file


@dataclass(frozen=True)
class Entry:
    """Describes a tensor as the header does."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    size: int
    sums: tuple[int, ...]  # of its pieces
    stride: tuple[int, ...] | None


# ---- writing ------------------------------------------------------------------------------------


def header_of(
    document: dict[str, Any],
    tensors: dict[str, Tensor],
    sums: dict[str, list[int]],
    sequence: int,
) -> bytes:
    """Returns the length and the header. Its size depends neither on the sums nor on the number."""
    notes: dict[str, dict[str, Any]] = {}
    entries: dict[str, dict[str, Any]] = {}
    start = 0
    for name, tensor in tensors.items():
        notes[name] = {"crc32": [f"{crc:08x}" for crc in sums[name]]}
        if strides := strides_to_keep(tensor):
            notes[name]["stride"] = strides
        entries[name] = {
            "dtype": layout.NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    whole = {"format": layout.FORMAT, **document, "piece": layout.PIECE, "tensors": notes}
    metadata = {
        "crc32": layout.ZEROS.decode(),
        "sequence": f"{sequence:0{layout.SEQUENCE_DIGITS}d}",
        "format": "pt",
        "headroom": _dumps(whole),
    }
    text = _dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = bytearray(struct.pack("<Q", len(text)) + text)
    header[CHECKSUM] = f"{layout.crc32(header):08x}".encode()
    return bytes(header)


def check_readable(header: bytes) -> None:
    """Raises ValueError for a header with more values than :func:`parsed` takes."""
    if _at_least(header) > layout.MOST_VALUES:  # counted quickly; now count exactly
        parsed(header[8:])


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _at_least(text: bytes) -> int:
    """Returns a number that is at least that of the values in a JSON text."""
    return 1 + sum(map(text.count, (b",", b":", b"[", b"{")))


# ---- reading ------------------------------------------------------------------------------------


def unsigned(header: bytes) -> bytes | None:
    """Returns the text of a header with its length before it, or None if its checksum is wrong."""
    data = bytearray(header)
    stored = bytes(data[CHECKSUM])
    data[CHECKSUM] = layout.ZEROS
    return bytes(data[8:]) if stored == f"{layout.crc32(data):08x}".encode() else None


def parsed(text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the entries of a header and its document. A few bytes of JSON can make hundreds in
    memory, so the values and brackets are counted before they are made.

    Raises:
        ValueError: it is malformed, or has more values than a header may have.
        RecursionError: the interpreter's stack is nearly full.
    """
    entries = _parsed_object(text)
    metadata = entries.pop("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("headroom"), str):
        raise ValueError("'__metadata__' has no 'headroom'")
    document = _parsed_object(metadata["headroom"].encode("utf-8", "surrogatepass"))
    sequence = metadata.get("sequence", "0")
    if not isinstance(sequence, str) or not re.fullmatch(r"[0-9]{1,16}", sequence):
        raise ValueError("'sequence' is not a number")
    return entries, document | {"sequence": int(sequence)}


def checked_entries(
    entries: dict[str, Any], document: dict[str, Any], data: int
) -> tuple[dict[str, Entry], int]:
    """Returns the tensors of a header in the order of the file, and the number of their bytes. The
    first begins at ``data``.

    Raises:
        One of MALFORMED: a part of the header does not fit the others.
    """
    for key, kind in layout.DOCUMENT.items():
        if type(document[key]) is not kind:
            raise TypeError(f"'{key}' is a {type(document[key]).__name__}")
    piece, found, end = document["piece"], {}, 0
    if piece <= 0:
        raise ValueError(f"pieces of {piece} bytes")
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        notes, (start, stop) = document["tensors"][name], entry["data_offsets"]
        dtype, shape = layout.DTYPES[entry["dtype"]], tuple(entry["shape"])
        stride = tuple(notes["stride"]) if "stride" in notes else None
        for number in (start, stop, *shape, *(stride or ())):
            if type(number) is not int or not 0 <= number < 2**63:
                raise ValueError(f"'{name}' has a size or an offset out of range")
        if len(shape) > layout.MOST_DIMS:
            raise ValueError(f"'{name}' has {len(shape)} dimensions")
        if start != end:
            raise ValueError(f"'{name}' does not follow the tensor before it")
        if stop - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"'{name}' has {stop - start:,} bytes, but shape {shape}")
        sums = tuple(int(crc, 16) for crc in notes["crc32"])
        if len(sums) != -(-(stop - start) // piece):
            raise ValueError(f"'{name}' has {len(sums)} checksums")
        if stride is not None:
            dense = torch.empty_strided(shape, stride, device="meta")
            if not torch.ops.aten.is_non_overlapping_and_dense(dense):
                raise ValueError(f"'{name}' has strides {stride}")
        elif start == stop:
            torch.empty(shape, dtype=dtype, device="meta")  # raises for sizes too large
        found[name] = Entry(dtype, shape, data + start, stop - start, sums, stride)
        end = stop
    return found, end


def _parsed_object(text: bytes) -> dict[str, Any]:
    # The text without its strings. Escapes go first, so that a quote then is the end of a string.
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    count = bare.count(b'"') // 2  # before each string is a comma, a colon or a bracket
    if count <= layout.MOST_VALUES:
        bare = re.sub(rb'"[^"]*"', b"", bare)
        count = _at_least(bare)
    if count > layout.MOST_VALUES:
        raise ValueError(f"it has {count:,} values, and {layout.MOST_VALUES:,} are allowed")
    brackets = bare.translate(None, bytes(set(range(256)) - set(b"[]{}")))
    for _ in range(DEEPEST):
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    if brackets:
        raise ValueError(f"its brackets do not match, or more than {DEEPEST} are in each other")
    found = json.loads(text.decode("utf-8", "surrogatepass"), parse_constant=_no_constant)
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
