"""Modules that hold something per adapter, of which adapters that are active are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn


class Switched(nn.Module):
    """Stands in the place of a module, and holds what adapters add to it, by their names.

    Attributes:
        enabled: whether active adapters are used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._active: tuple[str, ...] = ()
        self.enabled = True

    @property
    def names(self) -> list[str]:
        """Returns the names of the adapters that have a part here."""
        raise NotImplementedError

    @property
    def active(self) -> tuple[str, ...]:
        """Returns the names of the adapters that are active. It may be assigned to.

        Raises:
            ValueError: when they are assigned: there is no such adapter, or they cannot be active
                together.
        """
        return self._active

    @active.setter
    def active(self, names: Iterable[str]) -> None:
        self._active = self.checked(names)

    @property
    def added(self) -> tuple[str, ...]:
        """Returns the names of the adapters that a call uses."""
        return self.active if self.enabled else ()

    def checked(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the names, each once.

        Raises:
            ValueError: there is no adapter of a name, or they cannot be active together.
        """
        names = tuple(dict.fromkeys(names))
        for name in names:
            if name not in self.names:
                raise ValueError(f"there is no adapter {name!r}; there are {self.names}")
        return names

    def trained(self, name: str) -> list[nn.Parameter]:
        """Returns the parameters that an adapter has here, which train while it is active."""
        raise NotImplementedError

    def delete_adapter(self, name: str) -> None:
        """Removes what an adapter of this name has here, if there is something."""
        self._active = tuple(other for other in self._active if other != name)


def switched(model: nn.Module) -> dict[str, Switched]:
    """Returns the modules of a model that adapters switch, by their names."""
    return {name: one for name, one in model.named_modules() if isinstance(one, Switched)}


def outside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model by their names, without those inside of switched ones."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module not in inside:
            yield path, module
        if isinstance(module, Switched):
            inside |= {*module.modules()}


def is_in(path: str, other: str) -> bool:
    """Returns whether a module is another one, or lies in it, by their names."""
    return f"{path}.".startswith(f"{other}.")


def activate(model: nn.Module, names: Iterable[str]) -> None:
    """Makes these adapters active and lets them train; others are neither.

    Raises:
        ValueError: some module cannot use them together. Nothing is changed then.
    """
    names, modules = [*names], switched(model)
    chosen = {path: [name for name in names if name in one.names] for path, one in modules.items()}
    for path, one in modules.items():
        try:
            one.checked(chosen[path])
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from None
    for path, one in modules.items():
        one.active = chosen[path]
        for name in one.names:
            for param in one.trained(name):
                param.requires_grad_(name in one.active)


def replace(model: nn.Module, others: Mapping[int, nn.Module]) -> None:
    """Puts modules in the places of others, which are given by their ids, wherever they are held
    as children."""
    for parent in [*model.modules()]:
        for key, child in parent._modules.items():
            if id(child) in others:
                parent._modules[key] = others[id(child)]
