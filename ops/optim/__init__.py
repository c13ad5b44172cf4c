"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from ..state.compare import check_same_state
from ..state.convert import convert_state
from ..state.reshard import load_sharded
from .adafactor import Adafactor
from .adam import Adam, AdamW
from .adam8bit import Adam8bit, AdamW8bit
from .base import Optimizer
from .master_weights import load_master_weights, master_weights
from .memory import StateMemory
from .release import ReleaseHandle, release_gradients

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
