"""Leaves random numbers as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..planning.steps import generators_kept

__all__ = ["all_generators_kept"]


@contextmanager
def all_generators_kept(device: torch.device) -> Iterator[None]:
    """Runs a block after which the random numbers of torch, on the CPU and on ``device``, of
    Python and of numpy go on as if it had not run."""
    devices = [device] if device.type == "cuda" else []
    with generators_kept(), torch.random.fork_rng(devices=devices, device_type="cuda"):
        yield
