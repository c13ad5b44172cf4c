"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy
from .adafactor import Adafactor
from .adam import Adam, AdamW
from .adam8bit import Adam8bit, AdamW8bit
from .base import Optimizer
from .master_weights import load_master_weights, master_weights
from .memory import StateMemory
from .release import ReleaseHandle, release_gradients

if TYPE_CHECKING:
    from ..state import check_same_state, convert_state, load_sharded
else:  # the package of states needs this one
    __getattr__, __dir__ = lazy(
        __name__, {"..state": ("check_same_state", "convert_state", "load_sharded")}
    )

__all__ = [
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Optimizer",
    "ReleaseHandle",
    "StateMemory",
    "check_same_state",
    "convert_state",
    "load_master_weights",
    "load_sharded",
    "master_weights",
    "release_gradients",
]
