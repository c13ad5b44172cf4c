"""Caches of keys and values of transformers in layers that run a second time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def without_caches(
    layer: nn.Module, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments of a layer without the caches among them, by whatever name they are
    passed, or None where one is filled. Warns of ``what`` if there are any. A layer that says it
    can run a second time with a cache keeps it."""
    if getattr(layer, "_can_checkpoint_with_cache", False):
        return args, kwargs
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if any(is_filled(cache, layer) for cache in caches):
        return None
    if caches:
        warn_of_cache(layer, what)
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(kwargs[name]) else kwargs[name] for name in kwargs}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
    return args, kwargs


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def is_filled(cache: Any, layer: nn.Module) -> bool:
    """Returns whether a cache holds anything that ``layer`` has given it. It cannot be dropped
    then, and the layer would change it once more in a second run."""
    numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
    index = next((number for number in numbers if isinstance(number, int)), 0)
    try:
        return bool(cache.get_seq_length(index))
    except ValueError:  # a layer of linear attention, which has a state and counts no tokens
        return cache.has_previous_state(index)


def warn_of_cache(layer: nn.Module, what: str) -> None:
    """Says that keys and values are not cached, as transformers does where it checkpoints."""
    if not torch.compiler.is_compiling():
        from transformers.utils import logging

        logging.get_logger("transformers.modeling_layers").warning_once(
            f"Caching is incompatible with {what} in {type(layer).__name__}. "
            "Setting `past_key_values=None`."
        )
