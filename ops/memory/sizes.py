"""Sizes in bytes as text, for reports of memory: see :mod:`headroom._core.sizes`."""

from .._core.sizes import format_bytes, parse_bytes

__all__ = ["format_bytes", "parse_bytes"]
