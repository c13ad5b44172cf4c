"""The numbers and names of the layout of state files, their checksum, and their error.

Use them as attributes of this module, ``layout.PIECE``: tests replace some of them.
"""

from __future__ import annotations

import os
import re

import torch

from ..._core.text import shortened

try:
    from isal.isal_zlib import crc32 as crc32  # the same sums, several times as fast
except ImportError:
    from zlib import crc32 as crc32

FORMAT = 2
PIECE = 8 << 20  # bytes that have a checksum
BLOCK = 1 << 20  # bytes copied or read at a time: they stay in the cache until they are summed
SMALL = 1 << 18  # summed by the thread that writes: handing it to another would take longer
LONGEST_HEADER = 100_000_000  # safetensors' own limit
MOST_VALUES = 1 << 22  # in a header: some 300 MB of Python objects at worst
MOST_DIMS = 64  # torch's loops have no more
PREFIX = b'{"__metadata__":{"crc32":"'
ZEROS = b"0" * 8
SEQUENCE_DIGITS = 16
# A file with a number, which is the first group.
BEGINNING = re.compile(
    b'.{8}%b.{8}","sequence":"([0-9]{%d})' % (re.escape(PREFIX), SEQUENCE_DIGITS), re.DOTALL
)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DOCUMENT = {"tree": dict, "module_versions": dict, "saved_ns": int, "piece": int, "tensors": dict}
# Values of any kind may stand in a header that someone has made up.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


def threads() -> int:
    """Returns how many threads copy, read and sum."""
    return min(8, os.cpu_count() or 1)


class StateFileError(RuntimeError):
    """A state file is damaged, is not a state file, or is being written by someone else."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, 1000, keep="beginning"))  # it may quote the file
