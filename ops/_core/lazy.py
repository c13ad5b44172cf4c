"""Imports what a package offers when it is first used, so that importing the package is quick. The
root of the package fills in here what packages get from others that are above them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

reexported: dict[str, dict[str, str]] = {}
"""For a package, names that it offers too, and their modules, which are above it. The root of the
package fills it."""

advisers: list[Callable[..., list[str]]] = []
"""Each returns lines that say what would have made a step smaller, of the model, its optimizers,
the shapes of its arguments, and the bytes that were asked for. The root of the package adds what
plans them: the error of memory that ends with them is explained below the planner."""


def lazy(
    package: str, names: Mapping[str, Iterable[str]] = {}, modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and the ``__dir__`` of a package (PEP 562); the second shows its
    ``__all__``, imported or not.

    Args:
        package: its ``__name__``.
        names: those that each module offers; the module is relative to the package.
        modules: names of modules in the package that it offers themselves.
    """
    places = {name: module for module, offered in names.items() for name in offered}

    def get(name: str) -> Any:
        if name in modules:
            value = import_module(f".{name}", package)
        elif module := places.get(name) or reexported.get(package, {}).get(name):
            value = getattr(import_module(module, package), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(import_module(package), name, value)
        return value

    return get, lambda: list(import_module(package).__all__)
