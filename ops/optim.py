"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from .adafactor import Adafactor
from .adamw import Adam, AdamW
from .adamw8bit import Adam8bit, AdamW8bit
from .convert import convert_state
from .release_gradients import ReleaseHandle, release_gradients
from .reshard import load_sharded
from .same_state import check_same_state
from .weights import load_master_weights, master_weights

__all__ = [
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "ReleaseHandle",
    "check_same_state",
    "convert_state",
    "load_master_weights",
    "load_sharded",
    "master_weights",
    "release_gradients",
]
