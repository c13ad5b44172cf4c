"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from .adamw import Adam, AdamW
from .adamw8bit import Adam8bit, AdamW8bit
from .release_gradients import ReleaseHandle, release_gradients

__all__ = ["Adam", "Adam8bit", "AdamW", "AdamW8bit", "ReleaseHandle", "release_gradients"]
