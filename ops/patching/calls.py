"""Says when a swapped module may call an op, and when it calls its own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._core.surroundings import takes_ops

__all__ = ["CPU", "DEVICES", "own_forward", "takes"]

DEVICES = ("cpu", "cuda", "meta")
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are


def own_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the forward of the class, which a FSDP wrapper or a parametrization may have changed
    since the module was swapped."""
    return type(module).forward(module, *args, **kwargs)


def takes(x: Any, ranks: tuple[int, ...]) -> bool:
    """Returns whether an op takes ``x`` here, with the result of the module's own forward. What the
    ops do not take keeps the module's own code."""
    return takes_ops(x) and x.dim() in ranks
