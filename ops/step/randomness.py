"""Leaves random numbers as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["generators_kept"]


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Runs a block after which the random numbers of torch, on the CPU and on ``device``, of Python
    and of numpy go on as if it had not run."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    devices = [device] if device is not None and device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices, device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
