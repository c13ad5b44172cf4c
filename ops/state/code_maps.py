"""Refuses a file whose 8-bit codes stand for other values than in this version."""

from __future__ import annotations

import zlib

from .._core.text import quoted
from ..functional.dynamic_map import dynamic_map
from .file import StateFile, StateFileError

__all__ = ["check_maps", "maps_checksum"]


def maps_checksum() -> str:
    """Returns a checksum of the values that 8-bit codes stand for."""
    maps = (bytes(dynamic_map(signed).untyped_storage()) for signed in (True, False))
    return f"{zlib.crc32(b''.join(maps)):08x}"


def check_maps(file: StateFile) -> None:
    """Raises StateFileError if the file was saved with other maps."""
    saved = file.document.get("maps_crc32")
    if saved not in (None, maps_checksum()):
        raise StateFileError(
            f"the 8-bit codes in {file.path} stand for other values than in this version of "
            f"Headroom (maps {quoted(saved)}, wanted {maps_checksum()}); load it with "
            f"{quoted(file.document.get('headroom'))}"
        )
