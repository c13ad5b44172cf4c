"""Prints one JSON object for programs."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["print_json"]


def print_json(value: dict[str, Any]) -> None:
    """Prints an object as JSON, indented, with a line end. Its key "format" names the keys that the
    others are."""
    print(json.dumps(value, indent=2, ensure_ascii=True, default=str))
