"""Keeps Python from looking for garbage while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]


@contextmanager
def no_collections() -> Iterator[None]:
    """Runs a block or function without garbage collections, which would go through all of a large
    result again and again, and free tensors that a recorder should see."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
