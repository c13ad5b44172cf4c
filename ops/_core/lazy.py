"""Imports what a package offers when it is first used, so that importing the package is quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package (PEP 562).

    Args:
        package: its ``__name__``.
        modules: for each name the module that has it, relative to the package; a name that is
            ``f".{name}"`` itself is a package in it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name], package)
        value = module if modules[name] == f".{name}" else getattr(module, name)
        setattr(import_module(package), name, value)
        return value

    return get
