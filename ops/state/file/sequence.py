"""Numbers the state files of a folder in the order of their saving."""

from __future__ import annotations

import contextlib
import os

from .layout import BEFORE_SEQUENCE, PREFIX, SEQUENCE_DIGITS

__all__ = ["next_sequence"]


def next_sequence(folder: str) -> int:
    """Returns a number higher than that of any state file in a folder."""
    highest = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                highest = max(highest, _stored_sequence(entry.path))
    return min(highest + 1, 10**SEQUENCE_DIGITS - 1)


def _stored_sequence(path: str) -> int:
    """Returns the number in a header without a look at its checksum: a number that is too high does
    no harm here, and every file of the folder is asked."""
    begin = b""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb", buffering=0) as file:
                begin = file.read(8 + len(PREFIX) + 8 + len(BEFORE_SEQUENCE) + SEQUENCE_DIGITS)
    if begin[8:].startswith(PREFIX) and begin[8 + len(PREFIX) + 8 :].startswith(BEFORE_SEQUENCE):
        digits = begin[-SEQUENCE_DIGITS:]
        return int(digits) if digits.isdigit() else 0
    return 0
