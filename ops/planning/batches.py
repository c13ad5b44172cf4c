"""Batches of other sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..step.trees import mapped, tensors_in

__all__ = ["resized", "samples_of"]


def samples_of(batch: Any) -> int | None:
    """Returns the size of the first dimension of the first tensor that has any, or None."""
    return next((x.shape[0] for x in tensors_in(batch) if x.dim()), None)


def resized(batch: Any, samples: int) -> Any:
    """Returns a batch of as many samples, on the meta device."""
    count = samples_of(batch)
    if count is None:
        raise ValueError(
            "sample_batch has no tensor with a dimension, so it has no batch to resize"
        )

    def resize(x: Tensor) -> Tensor:
        if not x.dim() or x.shape[0] != count:
            return x
        return torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device="meta")

    return mapped(batch, resize)
