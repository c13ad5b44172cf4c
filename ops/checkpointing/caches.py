"""Caches of keys and values of transformers in layers that run a second time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def without_caches(
    layer: nn.Module, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments of a layer without the caches among them, by whatever name they are
    passed, or None where one is filled. Warns of ``what`` if there are any. A layer that says it
    can run a second time with a cache keeps it.

    Layers of transformers that are told to cache without a cache, in themselves, are told not to,
    as by transformers where it checkpoints."""
    if getattr(layer, "_can_checkpoint_with_cache", False):
        return args, kwargs
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if any(is_filled(cache, layer) for cache in caches):
        return None
    names = _names(type(layer).forward) if any(value is True for value in args) else ()
    tells = (dict(zip(names, args)) | kwargs).get("use_cache")
    if not caches and not (tells and checkpoints_by_itself(layer)):
        return args, kwargs
    warn_of_cache(layer, what, "past_key_values=None" if caches else "use_cache=False")

    def without(name: str | None, value: Any) -> Any:
        if _is_cache(value):
            return None
        return False if name == "use_cache" and value else value

    of = dict(enumerate(names))
    args = tuple(without(of.get(k), value) for k, value in enumerate(args))
    return args, {name: without(name, value) for name, value in kwargs.items()}


def checkpoints_by_itself(layer: nn.Module) -> bool:
    """Returns whether a layer is one of transformers that checkpoints itself when it is told to."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(layer).__mro__)


@functools.lru_cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the positional arguments of a layer's forward."""
    of_positions = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [*inspect.signature(forward).parameters.values()][1:]  # the first is the layer
    return tuple(p.name for p in parameters if p.kind in of_positions)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def is_filled(cache: Any, layer: nn.Module) -> bool:
    """Returns whether a cache holds anything that ``layer`` has given it. It cannot be dropped
    then, and the layer would change it once more in a second run."""
    numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
    index = next((number for number in numbers if isinstance(number, int)), 0)
    try:
        return bool(cache.get_seq_length(index))
    except ValueError:  # a layer that is no attention counts no tokens
        pass
    try:
        return cache.has_previous_state(index)
    except ValueError:  # and one that is no linear attention has no state
        return False


def warn_of_cache(layer: nn.Module, what: str, setting: str = "past_key_values=None") -> None:
    """Says that keys and values are not cached, as transformers does where it checkpoints."""
    if not torch.compiler.is_compiling():
        from transformers.utils import logging

        logging.get_logger("transformers.modeling_layers").warning_once(
            f"Caching is incompatible with {what} in {type(layer).__name__}. Setting `{setting}`."
        )
