"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from .adafactor import Adafactor
from .adamw import Adam, AdamW
from .adamw8bit import Adam8bit, AdamW8bit
from .convert import convert_state
from .release_gradients import ReleaseHandle, release_gradients
from .weights import load_master_weights, master_weights

__all__ = [
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "ReleaseHandle",
    "convert_state",
    "load_master_weights",
    "master_weights",
    "release_gradients",
]
