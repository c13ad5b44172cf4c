"""Muon: orthogonal updates of hidden matrices, and AdamW for all other parameters."""

from .choice import MuonChoice
from .muon import Muon
from .muon8bit import Muon8bit

__all__ = ["Muon", "Muon8bit", "MuonChoice"]
