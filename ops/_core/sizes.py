"""Sizes in bytes as text: GiB, and never GB unless the user writes it."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(size: int | float | str, name: str = "size") -> int:
    """Returns the number of bytes of ``"2 GiB"``, ``"1.5GiB"``, ``"300 MB"`` or a number.

    GiB is 2**30 bytes and GB 10**9; a number without a unit counts bytes.

    Args:
        name: of the argument, for errors.
    """
    wanted = 'wanted a number of bytes or text such as "2 GiB"'
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise TypeError(f"{name} is {size!r}, {wanted}")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name} is {size!r}, {wanted}; units are B, KiB, MiB, GiB, TiB")
        size = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if not math.isfinite(size) or size < 0:
        raise ValueError(f"{name} is {size!r}, {wanted}, not negative")
    return int(size)


def format_bytes(size: int | float, plus: str = "") -> str:
    """Returns a size with three or four digits: ``"1.50 GiB"``, ``"734 MiB"``, ``"512 B"``; with
    ``plus`` in front of one above 0."""
    sign, size = ("-" if size < 0 else plus if size > 0 else ""), abs(size)
    if size < 1000:
        return f"{sign}{size:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB", "PiB"]
    power = 1
    while size / 1024**power >= 999.5 and power < len(units):
        power += 1
    value = size / 1024**power
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f} {units[power - 1]}"
