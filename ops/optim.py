"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from .adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]
