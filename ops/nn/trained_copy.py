"""Modules of which each adapter trains a copy of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from .fused import is_untouched
from .switched import Switched


class TrainedCopy(Switched):
    """A module that stays as it is, and a copy of it per adapter, which trains: PEFT's
    ``modules_to_save``. The copy of the adapter that is active is called; without one, the module.

    Names of parameters are those of PEFT: ``original_module.weight`` and
    ``modules_to_save.default.weight``. Other attributes are those of the module that is called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict()
        self.train(module.training)

    @property
    def names(self) -> list[str]:
        return [*self.modules_to_save]

    @property
    def current(self) -> nn.Module:
        """Returns the module that a call runs."""
        return self.modules_to_save[self.added[0]] if self.added else self.original_module

    def add_adapter(self, name: str, memo: dict[int, Any] | None = None) -> None:
        """Adds a copy, which is not active yet.

        Args:
            name: of the adapter.
            memo: of ``copy.deepcopy``: copies of modules that are given the same one share what
                the modules share, such as a tied weight.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self.modules_to_save:
            raise ValueError(f"there is a copy of adapter {name!r} already")
        self.modules_to_save[name] = copy.deepcopy(self.original_module, memo)

    def checked(self, names: Iterable[str]) -> tuple[str, ...]:
        names = super().checked(names)
        if len(names) > 1:
            raise ValueError(f"{[*names]} have a copy of it each, and one of them can be active")
        return names

    def trained(self, name: str) -> list[nn.Parameter]:
        params = self.modules_to_save[name].parameters()
        return [param for param in params if param.is_floating_point()]

    def delete_adapter(self, name: str) -> None:
        super().delete_adapter(name)
        if name in self.modules_to_save:
            del self.modules_to_save[name]

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.current(*args, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "original_module" or "original_module" not in self._modules:
                raise  # it is being made
            return getattr(self.current, name)


def called(module: Any) -> Any:
    """Returns the module that a call of this one runs: the copy of an adapter, if it is no more."""
    return module.current if isinstance(module, TrainedCopy) and is_untouched(module) else module
