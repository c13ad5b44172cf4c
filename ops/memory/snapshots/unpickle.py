"""Reads a pickle of dicts, lists, tuples, text and numbers, and nothing else: no code of the file
runs, and its memory and time are bounded by its size.

:class:`pickle.Unpickler` alone is not enough, also without ``find_class``: a few bytes can ask it
for a table of 2**32 entries, or for a buffer of any size. Every instruction is therefore looked at
before, by a regular expression, because a loop in Python over a file of a gigabyte would take
minutes.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import stat
from typing import Any

from ..._core.sizes import format_bytes

__all__ = ["read_pickle"]

_CHUNK = 4096  # instructions that one match may take, which bounds what it remembers
_SHORT = b"|".join(
    re.escape(bytes([size])) + (b".{%d}" % size if size else b"") for size in range(256)
)
_LONG = b"|".join(
    re.escape(bytes([size])) + (b".{%d}" % size if size else b"") for size in range(9)
)


def _instructions(entries: int) -> re.Pattern[bytes]:
    """Matches instructions that make plain values. ``entries`` is the most that the table of values
    that occur again may have."""
    top = next(k for k in range(5) if 256**k > min(entries, 2**32 - 1))
    number = b".{%d}%s" % (top, b"\\x00" * (4 - top))
    one = b"|".join(
        [
            rb"[()\]}Naesut\x85-\x89\x94]",  # marks, containers, None, True, False, MEMOIZE
            rb"h.|K.|M..|J....|G.{8}|j....",  # references, small numbers
            rb"\x8c(?:%s)" % _SHORT,
            rb"\x8a(?:%s)" % _LONG,
            rb"q.|r%s" % number,  # BINPUT, LONG_BINPUT
            rb"\x95.{8}",  # FRAME
        ]
    )
    return re.compile(rb"(?:%s){1,%d}" % (one, _CHUNK), re.DOTALL)


class _NoObjects(pickle.Unpickler):
    """Refuses what the check lets through by a mistake of ours."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds the object {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to other files")


def read_pickle(path: str | os.PathLike[str], most: int) -> Any:
    """Returns the value in a file.

    Args:
        most: the largest size of a file that is read. Values take up to some 20 times as much.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such pickle, or larger; the text says why, without the path.
    """
    with open(path, "rb", opener=_open_file) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(
                f"it has {format_bytes(size)}, more than {format_bytes(most)}: raise max_bytes if "
                "you trust it and have the memory"
            )
        data = file.read(size)
    _check(data)
    try:
        return _NoObjects(io.BytesIO(data)).load()
    except Exception as error:  # whatever forged instructions make it raise
        raise ValueError(f"it is damaged: {error or type(error).__name__}") from error


def _open_file(path: str, flags: int) -> int:
    file = os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError("it is no regular file")
    return file


def _check(data: bytes) -> None:
    """Raises ValueError unless all of the data is instructions that make plain values."""
    if data[:1] != b"\x80" or len(data) < 3 or not 2 <= data[1] <= 5:
        raise ValueError("it is no pickle of protocol 2 to 5")
    match = _instructions(len(data)).match
    at, end = 2, len(data)
    while at < end:
        found = match(data, at)
        if found is not None:
            at = found.end()
        elif data[at : at + 1] == b"X" and at + 5 <= end:  # BINUNICODE: text of 256 bytes or more
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif data[at : at + 1] == b".":  # STOP
            return
        else:
            raise ValueError(_refusal(data, at))
    raise ValueError("it is cut off")


def _refusal(data: bytes, at: int) -> str:
    """Returns why the instruction at a place is not taken."""
    code = data[at : at + 1]
    if code == b"c":  # GLOBAL: two lines of text
        name = b".".join(data[at + 1 : at + 200].split(b"\n", 2)[:2])
        return f"it holds the object {name.decode('ascii', 'replace')}, and a snapshot holds none"
    if code in (b"\x93", b"R", b"i", b"o", b"b", b"\x81", b"\x92", b"\x82", b"\x83", b"\x84"):
        return "it holds an object, and a snapshot holds none"
    if len(data) - at < 300:
        return f"it is cut off or damaged at byte {at:,}"
    return f"byte {at:,} ({code!r}) makes something that a snapshot has not"
