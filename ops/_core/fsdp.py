"""Finds the classes of FSDP without importing it: only a program that did can have such a model."""

from __future__ import annotations

import sys


def fsdp_class(name: str) -> tuple[type, ...]:
    """Returns a class of :mod:`torch.distributed.fsdp` for ``isinstance``, or no class while that
    module, which takes long to import, is not loaded."""
    module = sys.modules.get("torch.distributed.fsdp")
    cls = getattr(module, name, None)  # None while the module is being imported
    return () if cls is None else (cls,)
