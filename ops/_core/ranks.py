"""Says how many ranks there are, and finds the classes of FSDP without importing it: only a program
that did can have such a model."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist


def world_size(group: Any = None) -> int:
    """Returns the number of ranks of a process group; 1 where there are no processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def fsdp_class(name: str) -> tuple[type, ...]:
    """Returns a class of :mod:`torch.distributed.fsdp` for ``isinstance``, or no class while that
    module, which takes long to import, is not loaded."""
    module = sys.modules.get("torch.distributed.fsdp")
    cls = getattr(module, name, None)  # None while the module is being imported
    return () if cls is None else (cls,)
