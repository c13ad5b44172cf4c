"""Chooses the adapters of a model that its layers add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..nn.lora import activate, adapter_names, lora_layers


def use_adapters(model: nn.Module, *names: str) -> None:
    """Makes these adapters of a model the ones that are added up and train; all others do neither.

    Raises:
        ValueError: the model has no adapter of a name.
    """
    for name in names:
        _check(model, name)
    activate(model, names)


def delete_adapter(model: nn.Module, name: str = "default") -> None:
    """Removes an adapter from a model. Layers without any go on as :class:`headroom.nn.LoRALinear`.

    Raises:
        ValueError: the model has no adapter of this name.
    """
    _check(model, name)
    for layer in lora_layers(model).values():
        layer.delete_adapter(name)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Returns a context in which a model computes as it did without adapters, such as the reference
    of a preference loss."""
    before = [(layer, layer.enabled) for layer in lora_layers(model).values()]
    try:
        for layer, _ in before:
            layer.enabled = False
        yield
    finally:
        for layer, enabled in before:
            layer.enabled = enabled


def _check(model: nn.Module, name: str) -> None:
    names = adapter_names(model)
    if name not in names:
        raise ValueError(f"the model has no adapter {name!r}; it has {names}")
