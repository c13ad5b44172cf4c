"""Refuses states that are malformed, before they are converted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._core.overlap import is_freed
from .codes import Codes, are_scales, shown
from .neutral import RULES, SQUARES, number_of

STEPS = 2.0**53  # the largest counter that Headroom steps from, and that a float64 counts exactly


@contextmanager
def described(what: str, held: dict[Any, Any]) -> Iterator[None]:
    """Turns an error into a ValueError that says where it was. Forged values can fail in many
    ways."""
    try:
        yield
    except (ImportError, NotImplementedError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, KeyError):
            said = f"has no {error}"
        elif isinstance(error, (ValueError, RuntimeError)):
            said = str(error)
        else:
            said = f"cannot be read: {type(error).__name__}: {error}"
        raise ValueError(f"{what} {said}; it has {sorted(map(str, held))}") from error


def keys_of(source: Any) -> list[Any]:
    """Returns the parameters' keys of a state dict, in order. Refuses what is not a state dict."""
    if not isinstance(source, Mapping) or not {"state", "param_groups"} <= source.keys():
        found = sorted(map(str, source)) if isinstance(source, Mapping) else type(source).__name__
        raise ValueError(f"a state dict has 'state' and 'param_groups', this {found}")
    state, groups = source["state"], source["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        raise ValueError(
            "'state' must be a dict and 'param_groups' a list, got "
            f"{type(state).__name__} and {type(groups).__name__}"
        )
    keys: list[Any] = []
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"group {index} must be a dict with a list 'params'")
        keys += group["params"]
    for key in keys:
        if not isinstance(key, (int, str)):
            raise ValueError(f"the key of a parameter must be a number or a name, got {shown(key)}")
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"parameter {twice!r} is in the groups twice")
    for key in state.keys() - set(keys):
        raise ValueError(f"there is a state of {key!r}, which is in no group")
    for key, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"the state of parameter {key} is a {type(entry).__name__}, not a dict"
            )
    return keys


def check_options(group: Mapping[str, Any]) -> None:
    """Refuses options of a group without a learning rate, or with tensors that have no memory."""
    check_tensors(group)
    lr = group["lr"]
    number = number_of(lr)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"have an lr of {shown(lr)}, wanted a number")
    if not 0 <= number < math.inf:
        raise ValueError(f"have an lr of {number}, wanted a finite number >= 0")


def check_tensors(value: Any) -> None:
    """Refuses an entry with a tensor whose memory cannot be read."""
    if isinstance(value, Mapping):
        for inner in value.values():
            check_tensors(inner)
    elif hasattr(value, "codes"):  # torchao's, of several tensors
        for name in ("codes", "scale", "qmap"):
            check_tensors(getattr(value, name, None))
    elif isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise ValueError(f"has a tensor without data: {value.layout} on {value.device}")
        if is_freed(value):
            raise ValueError("has a tensor whose memory has been freed")


def checked_step(step: Any) -> float:
    """Returns a step counter as a number. Refuses what is not a whole number from 0 to 2^53."""
    number = number_of(step)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"has a step of {shown(step)}, wanted a number")
    if not 0 <= number <= STEPS or number != int(number):
        raise ValueError(f"has a step of {number}, wanted a whole number from 0 to 2^53")
    return number


def check_moments(moments: dict[str, Tensor | Codes]) -> None:
    """Refuses moments with values that training never makes."""
    for name, moment in moments.items():
        if isinstance(moment, Codes):
            if not are_scales(moment.absmax):
                raise ValueError(f"has scales of '{name}' that are negative or not finite")
            continue
        if not isinstance(moment, Tensor) or not moment.is_floating_point():
            kind = moment.dtype if isinstance(moment, Tensor) else type(moment).__name__
            raise ValueError(f"has an '{name}' of {kind}, without scales")
        # min() of a NaN is NaN. Infinity comes from an overflow, and gives updates of 0.
        if name in SQUARES and moment.numel() and not moment.min() >= 0:
            raise ValueError(f"has an '{name}' with negative elements, or NaN")


def check_shapes(moments: dict[str, Tensor | Codes], rule: str) -> None:
    """Refuses moments that are not those of a rule, or do not have one shape."""
    shapes, wanted = {moment.shape for moment in moments.values()}, RULES[rule]
    if rule == "sgd" and not moments:
        return  # without momentum
    if moments.keys() - {"max_exp_avg_sq"} != set(wanted) or len(shapes) != 1:
        raise ValueError(
            f"has moments {sorted(moments)}, of shapes {sorted(map(tuple, shapes))}; wanted "
            f"{wanted} of one shape"
        )
