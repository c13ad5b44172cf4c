"""Optimizers with the names and arguments of :mod:`torch.optim`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy
from ..param_states.memory import StateMemory
from ..param_states.paging import OffloadHandle
from .adafactor import Adafactor
from .adam import Adam, AdamW
from .adam8bit import Adam8bit, AdamW8bit
from .base import Optimizer
from .master_weights import load_master_weights, master_weights
from .momentum import SGD, Lion
from .momentum8bit import Lion8bit, SGD8bit
from .muon import Muon, Muon8bit
from .offloading import offload

if not TYPE_CHECKING:  # names that the root lends
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Lion8bit",
    "Muon",
    "Muon8bit",
    "OffloadHandle",
    "Optimizer",
    "SGD",
    "SGD8bit",
    "StateMemory",
    "load_master_weights",
    "master_weights",
    "offload",
]
