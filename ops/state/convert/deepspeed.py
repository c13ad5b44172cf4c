"""Writes states of DeepSpeed's DeepSpeedCPUAdam."""

from __future__ import annotations

from typing import Any

from .adam import read_adam
from .apex import write_apex
from .neutral import Context, Library, State

__all__ = ["LIBRARIES"]


def _write_deepspeed(state: State, context: Context) -> dict[str, Any]:
    return {"step": int(state.step), **write_apex(state, context)}


LIBRARIES = {
    "deepspeed": Library(
        read_adam, _write_deepspeed, {"bias_correction": True, "amsgrad": False}, casts=True
    ),
}
