"""Finds classes of transformers in tables, and whether their ``forward`` is still their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

_Entry = TypeVar("_Entry", bound=Any)

LIBRARIES = ("transformers", "torch", "accelerate", "headroom")  # whose decorators change nothing


def class_in(module: nn.Module, table: Mapping[str, _Entry]) -> tuple[type, _Entry] | None:
    """Returns the class of a module, or that which it is derived from, that a table has by its name
    and where it is defined, with its entry; or None."""
    for kind in type(module).__mro__:
        entry = table.get(kind.__name__)
        if entry is not None and kind.__module__ == entry.module:
            return kind, entry
    return None


def runs_forward_of(own: Any, known: Any) -> bool:
    """Returns whether objects of a class run the ``forward`` that the source of ``known`` defines:
    neither a class derived from it nor anybody who sets another one on a class, or wraps it, has
    changed that. Classes of FSDP2 leave it alone."""
    function, inner = None, own.forward
    while inner is not None:
        function = inner
        space = getattr(function, "__globals__", {}).get("__name__") or ""
        if space.partition(".")[0] not in LIBRARIES:
            return False
        inner = getattr(function, "__wrapped__", None)
    name = f"{known.__qualname__}.forward"
    return space == known.__module__ and getattr(function, "__qualname__", None) == name


def entry_of(module: nn.Module, table: Mapping[str, _Entry]) -> _Entry | None:
    """Returns the entry of a table for the class of a module, by its name and where it is defined,
    or None. A class derived from it counts if it leaves ``forward`` alone."""
    found = class_in(module, table)
    if found is None or not runs_forward_of(type(module), found[0]):
        return None
    return found[1]
