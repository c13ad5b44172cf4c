"""The attributes of modules before a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..patching.changes import patched_names

__all__ = ["ModulesBefore"]

# The containers of every module, among them those of parameters, buffers and hooks.
CONTAINERS = frozenset(name for name in vars(nn.Module()) if name.startswith("_"))
LEVEL = "_level"  # where a block of headroom.nn has what its ``save`` is


class ModulesBefore:
    """The attributes of modules before a step, such as counters, recurrent states and the lengths
    that caches are of. They become the objects again that they were; what a list or a dictionary
    among them holds is not looked at. Levels and patches are settings, and stay.

    Results that a graph leads to, such as a loss that a module leaves for the step to pick up, are
    not kept alive: if the step has replaced them, they become None.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Every step does this, so that a function for each attribute would be felt.
        self._seen = [
            (
                attributes := vars(module),
                {
                    name: value if not isinstance(value, Tensor) else _held(value)
                    for name, value in attributes.items()
                    if name not in CONTAINERS
                },
            )
            for module in modules
        ]

    def lost(self) -> str | None:
        """Returns None: all of them can be put back."""
        return None

    def restore(self) -> None:
        """Gives the modules their attributes back, and no others."""
        for attributes, before in self._seen:
            settings = {LEVEL, *patched_names(attributes), *patched_names(before)}
            for name in attributes.keys() - before.keys() - settings - CONTAINERS:
                del attributes[name]
            for name in before.keys() - settings:
                held = before[name]
                attributes[name] = held() if isinstance(held, TensorWeakRef) else held


def _held(value: Tensor) -> Any:
    return value if value.grad_fn is None else TensorWeakRef(value)
