"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from .adafactor import Adafactor
from .adamw import Adam, AdamW
from .adamw8bit import Adam8bit, AdamW8bit

__all__ = ["Adafactor", "Adam", "Adam8bit", "AdamW", "AdamW8bit"]
