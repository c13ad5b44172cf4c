"""Chooses the adapters of a model that its layers add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .._core.all_or_nothing import all_or_nothing
from .._core.checks import check_module
from ..nn.switched import activate, switched


def use_adapters(model: nn.Module, *names: str) -> None:
    """Makes these adapters of a model the ones that are added up and train; all others do neither.

    Raises:
        ValueError: the model has no adapter of a name; or one of several has DoRA, or a copy of a
            module of which another has one too.

    Nothing is changed where it raises or is interrupted.
    """
    check_module(model)
    for name in names:
        _check(model, name)
    with all_or_nothing(model):
        activate(model, names)


def delete_adapter(model: nn.Module, name: str = "default") -> None:
    """Removes an adapter from a model, with its copies of modules. Layers without any go on as
    :class:`headroom.nn.LoRALinear`.

    Raises:
        ValueError: the model has no adapter of this name.

    Nothing is changed where it raises or is interrupted.
    """
    check_module(model)
    _check(model, name)
    with all_or_nothing(model):
        for one in switched(model).values():
            one.delete_adapter(name)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Returns a context in which a model computes as it did without adapters, such as the reference
    of a preference loss."""
    check_module(model)
    before = [(one, one.enabled) for one in switched(model).values()]
    try:
        for one, _ in before:
            one.enabled = False
        yield
    finally:
        for one, enabled in before:
            one.enabled = enabled


def _check(model: nn.Module, name: str) -> None:
    names = [*dict.fromkeys(each for one in switched(model).values() for each in one.names)]
    if name not in names:
        raise ValueError(f"the model has no adapter {name!r}; it has {names}")
