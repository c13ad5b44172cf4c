"""How many bytes of gradients wait for each other where they are released."""

from __future__ import annotations

import inspect

from torch import nn

from ..optim import release_gradients
from .choice import Choice

__all__ = ["BUCKET_BYTES", "bucket_of"]

BUCKET_BYTES = inspect.signature(release_gradients).parameters["bucket_bytes"].default
BUCKETS = 8  # or more, that the gradients of a model fill


def bucket_of(model: nn.Module, choice: Choice) -> int:
    """Returns the ``bucket_bytes`` of :func:`headroom.release_gradients` for a model with a choice:
    the default, or less for a small model, whose gradients would all wait in one bucket.

    It is the same before and after the choice is applied to the model.
    """
    is_cast = choice.weights == "bf16"
    gradients = sum(
        p.numel() * (2 if is_cast else p.element_size())
        for p in model.parameters()
        if p.requires_grad
    )
    return max(1, min(BUCKET_BYTES, gradients // BUCKETS))
