"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from .adamw import Adam, AdamW
from .adamw8bit import Adam8bit, AdamW8bit
from .weights import load_master_weights, master_weights

__all__ = ["Adam", "Adam8bit", "AdamW", "AdamW8bit", "load_master_weights", "master_weights"]
