"""The copy engine of each device."""

from __future__ import annotations

import torch

from .cuda import Streams
from .engine import Engine, Inline

_engines: dict[torch.device, Engine] = {}


def engine_of(device: torch.device) -> Engine:
    """Returns the engine of a device, which is made at the first call and shared by all that use
    it."""
    if device not in _engines:
        _engines[device] = Streams(device) if device.type == "cuda" else Inline()
    return _engines[device]
