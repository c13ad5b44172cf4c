"""Finds Headroom without importing it, which would load torch: the device has to be there first."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["folder", "module"]


def folder() -> Path:
    """Returns where the package headroom is.

    Raises:
        RuntimeError: there is none.
    """
    found = importlib.util.find_spec("headroom")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("there is no package headroom beside headroom_rehearsal")
    return Path(next(iter(found.submodule_search_locations)))


def module(file: str) -> ModuleType:
    """Returns a module of Headroom that imports nothing, such as ``"_core/sizes.py"``."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, folder() / file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
