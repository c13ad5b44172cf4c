"""Registers memory with CUDA, so that a device copies to and from it beside other work."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.sizes import format_bytes

_warned = False


def pinned(slab: Tensor, device: torch.device, runtime: Any = None) -> Callable[[], None] | None:
    """Registers a slab, and returns what undoes that; or None where the system refuses, as WSL does
    above a gigabyte: copies then wait for the device, and a warning says so once.

    Args:
        runtime: with ``cudaHostRegister`` and ``cudaHostUnregister``; None: that of CUDA.
    """
    global _warned
    runtime = torch.cuda.cudart() if runtime is None else runtime
    address = slab.data_ptr()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        status = int(runtime.cudaHostRegister(address, slab.nbytes, 0))
    if status == 0:
        return lambda: _unregistered(runtime, address)
    if not _warned:
        _warned = True
        warnings.warn(
            f"CUDA does not register {format_bytes(slab.nbytes)} of host memory (error {status}; "
            "WSL and Windows limit what they register): copies to and from it wait for the device",
            stacklevel=4,
        )
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device=device).add_(1)  # reads the error, which the next launch would raise
    return None


def _unregistered(runtime: Any, address: int) -> None:
    runtime.cudaHostUnregister(address)
