"""Writes states of apex's FusedAdam, whose step is in the group."""

from __future__ import annotations

from typing import Any

from .adam import read_adam, write_torch
from .neutral import MOMENTS, Context, Library, State

__all__ = ["LIBRARIES", "write_apex"]


def write_apex(state: State, context: Context) -> dict[str, Any]:
    # The step is in the group.
    entry = write_torch(state, context)
    return {name: entry[name] for name in MOMENTS[:2]}


LIBRARIES = {
    "apex": Library(read_adam, write_apex, {"bias_correction": True}, ("step",), True),
}
