"""Batches of other sizes."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["resized"]


def resized(batch: Any, samples: int) -> Any:
    """Returns a batch of as many samples, on the meta device."""
    first: list[int] = []

    def resize(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dim() and not first:
                first.append(value.shape[0])
            if value.dim() and value.shape[0] == first[0]:
                shape = (samples, *value.shape[1:])
                return torch.empty(shape, dtype=value.dtype, device="meta")
            return value
        if isinstance(value, MutableMapping):
            made = copy.copy(value)
            made.update({key: resize(item) for key, item in value.items()})
            return made
        if isinstance(value, (list, tuple)):
            items = [resize(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    made = resize(batch)
    if not first:
        raise ValueError(
            "sample_batch has no tensor with a dimension, so it has no batch to resize"
        )
    return made
