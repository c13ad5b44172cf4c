"""Checks the arguments of ``headroom.fit`` and ``headroom.ladder`` that stand for themselves."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..step.trees import tensors_in
from .choice import Choice

__all__ = ["check_arguments", "check_margin", "check_only"]

PLAIN = (tuple, list, Mapping, DataLoader, Dataset)
"""Batches in which nothing but a tensor is looked for. Others may have them wherever they like."""


def check_arguments(
    sample_batch: Any,
    *,
    loss: Any = None,
    forward: Any = None,
    amp: Any = None,
    scaler: Any = None,
    max_grad_norm: Any = None,
    allow: Any = (),
) -> None:
    """Checks what would otherwise fail deep in a step, or not at all.

    Raises:
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    # NumPy may be missing, so its arrays are known by what they have.
    is_plain = isinstance(sample_batch, PLAIN) or hasattr(sample_batch, "__array_interface__")
    if is_plain and next(tensors_in(sample_batch), None) is None:
        raise TypeError(
            f"sample_batch is a {type(sample_batch).__name__} without tensors, wanted one batch of "
            "the loop; of a DataLoader: next(iter(loader))"
        )
    for name, value in (("loss", loss), ("forward", forward)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} is {value!r}, wanted a function")
    if amp is not None and not (isinstance(amp, torch.dtype) and amp.is_floating_point):
        raise TypeError(f"amp is {amp!r}, wanted a dtype such as torch.bfloat16")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler is {scaler!r}, wanted a torch.amp.GradScaler")
    if max_grad_norm is not None:
        _check_number("max_grad_norm", max_grad_norm, "a norm above 0")
        if not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}, wanted a norm above 0")
    if not isinstance(allow, (str, list, tuple, set, frozenset)):
        raise TypeError(f'allow is {allow!r}, wanted names such as ("8bit", "bf16")')


def check_margin(margin: Any) -> None:
    """Checks the share of a budget that is left free.

    Raises:
        TypeError, ValueError: it is none.
    """
    if margin is None:
        return
    _check_number("margin", margin, "a share of the budget, such as 0.02")
    if not 0 <= margin < 1:
        raise ValueError(f"margin is {margin}, wanted a share of the budget from 0 to below 1")


def check_only(only: Any) -> None:
    """Checks the values that fields of a choice may have.

    Raises:
        TypeError: it is no dict of collections, or a value is of another type than the field.
        ValueError: a field is unknown, has no values, or has a number below 1.
    """
    wanted = 'wanted a dict of values for fields of a Choice, such as {"micro_batches": (2, 4)}'
    if only is not None and not isinstance(only, Mapping):
        raise TypeError(f"only is {only!r}, {wanted}")
    defaults = {part.name: part.default for part in fields(Choice) if part.name != "levels"}
    for name, values in (only or {}).items():
        if name not in defaults:
            raise ValueError(f"only has {name!r}, wanted some of {', '.join(sorted(defaults))}")
        if isinstance(values, str) or not isinstance(values, Collection):
            raise TypeError(f"only has {name}={values!r}, {wanted}")
        if not values:
            raise ValueError(
                f"only has {name}={values!r}, wanted one value or more; leave {name} out of it for "
                "any"
            )
        kind = type(defaults[name])
        for value in values:
            if type(value) is not kind:  # True is no number of micro-batches
                raise TypeError(
                    f"only has {value!r} for {name}, wanted values of type {kind.__name__}"
                )
            if kind is int and value < 1:
                raise ValueError(f"only has {value} for {name}, wanted whole numbers from 1 on")


def _check_number(name: str, value: Any, wanted: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or math.isnan(value):
        raise TypeError(f"{name} is {value!r}, wanted {wanted}")
