"""Batches of other sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..step.trees import mapped, tensors_in

__all__ = ["resized"]


def resized(batch: Any, samples: int) -> Any:
    """Returns a batch of as many samples, on the meta device."""
    first = next((x for x in tensors_in(batch) if x.dim()), None)
    if first is None:
        raise ValueError(
            "sample_batch has no tensor with a dimension, so it has no batch to resize"
        )

    def resize(x: Tensor) -> Tensor:
        if not x.dim() or x.shape[0] != first.shape[0]:
            return x
        return torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device="meta")

    return mapped(batch, resize)
