"""Checks the options and parameters that the groups of all optimizers have."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_number, check_pair
from .._core.registration import FLOATS
from .._core.text import quoted
from .._core.weight_modes import NEAREST, weights_mode


def own_arguments(scope: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a constructor from its ``locals()``, taken in its first line."""
    return {name: value for name, value in scope.items() if name not in ("self", "__class__")}


def of_groups(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of groups among a constructor's: torch's keys and no other, unless an
    option of Headroom is used."""
    left_out = {name for name in ("state_dtype", "max_grad_norm") if given.get(name) is None}
    if weights_mode(given["master"], given["rounding"]) is NEAREST:
        left_out |= {"master", "rounding", "seed"}
    return {name: value for name, value in given.items() if name not in left_out}


def check_betas(betas: Any) -> None:
    """Refuses decay rates that are no pair of numbers from 0 to below 1."""
    check_pair("betas", betas)
    for index in (0, 1):
        check_number(f"betas[{index}]", betas[index])
        if not 0.0 <= betas[index] < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {betas[index]}")


def check_fused(options: dict[str, Any], optimizer: str) -> None:
    """Refuses what no fused optimizer takes: a weight decay below 0, ``differentiable``, and other
    dtypes of states."""
    check_number("weight_decay", options["weight_decay"])
    if not 0.0 <= options["weight_decay"] < math.inf:
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")
    if options["differentiable"]:
        raise RuntimeError(
            f"{optimizer} does not support differentiable=True: its step is one fused op"
        )
    if options.get("state_dtype") not in (None, *FLOATS):
        raise ValueError(f"state_dtype must be one of {FLOATS}, got {options['state_dtype']}")


def check_lr(lr: Any, words: str) -> None:
    """Refuses a learning rate that is no number of 0 or more, nor a tensor of one; ``words`` are
    those of torch for a number out of range."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if lr.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Tensor lr must be float32 or float64, got {lr.dtype}")
    elif not isinstance(lr, Real):
        raise TypeError(f"lr must be a number or a Tensor, got {type(lr).__name__}")
    if not 0.0 <= lr < math.inf:
        raise ValueError(f"{words}: {lr}")


def check_loaded_group(
    group: dict[str, Any],
    defaults: dict[str, Any],
    check: Callable[[dict[str, Any]], None],
    index: int,
) -> None:
    """Refuses a group of a checkpoint that lacks an option of ``defaults``, has one of another
    type, or does not pass ``check``."""
    place = f"param_groups[{index}] of the loaded state"
    # Torch's groups lack the first, and torch itself adds the second to the defaults.
    wanted = defaults.keys() - {"max_grad_norm", "differentiable"}
    missing = sorted(wanted - group.keys())
    if missing:
        raise ValueError(f"{place} has no {', '.join(map(repr, missing))}")
    _check_types(group, defaults, place)
    try:
        check(group)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{place}: {quoted(error, 600)}") from error


def _check_types(group: dict[str, Any], defaults: dict[str, Any], place: str) -> None:
    """Refuses options of other types than the optimizer's."""
    for key in ("master", "rounding"):
        if not isinstance(group.get(key), (str, type(None))):
            got = type(group[key]).__name__
            raise TypeError(f"{place} has {key} of type {got}, wanted a string or None")
    dtype = group.get("state_dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{place} has state_dtype of type {type(dtype).__name__}, wanted a dtype")
    for key, default in defaults.items():
        if isinstance(default, bool) and not (
            isinstance(group.get(key, default), Integral) and group.get(key, default) in (0, 1)
        ):
            raise TypeError(f"{place} has {key}={group[key]!r}, wanted True or False")


def keep_unique(group: dict[str, Any]) -> None:
    """Drops parameters that occur twice in a group, with their names."""
    unique = list(dict.fromkeys(group["params"]))
    if len(unique) < len(group["params"]):
        if "param_names" in group:
            names = dict(zip(reversed(group["params"]), reversed(group["param_names"])))
            group["param_names"] = [names[param] for param in unique]
        group["params"] = unique
