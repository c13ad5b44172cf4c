"""Says when a swapped module may call an op, and when it calls its own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from .._core.registration import FLOATS
from .._core.surroundings import is_plain

__all__ = ["CPU", "DEVICES", "own_forward", "takes"]

DEVICES = ("cpu", "cuda", "meta")
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are


def own_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the forward of the class, which a FSDP wrapper or a parametrization may have changed
    since the module was swapped."""
    return type(module).forward(module, *args, **kwargs)


def takes(x: Any, ranks: tuple[int, ...]) -> bool:
    """Returns whether an op takes ``x`` here, with the result of the module's own forward.

    What the ops do not take keeps the module's own code: float64, nested and subclassed tensors,
    other devices, transforms of ``torch.func`` and forward-mode derivatives. So do traces that
    leave Python, which shall not depend on this package.
    """
    if (
        not is_plain(x)
        or x.dtype not in FLOATS
        or x.device.type not in DEVICES
        or x.dim() not in ranks
        or x.is_nested
        or x.layout is not torch.strided
    ):
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return not (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
