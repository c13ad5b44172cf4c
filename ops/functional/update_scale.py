"""Updates a dynamic loss scale on the device: the op ``headroom::update_scale_``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._core.registration import complete, require


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 0.0,
    max_scale: float = math.inf,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
) -> None:
    """Lowers a loss scale after an overflow, and raises it after ``growth_interval`` steps without
    overflow.

    Args:
        scale: float32, one element; written.
        growth_tracker: int32, one element: steps since the last change; written.
        found_inf: float32, one element; not 0 after an overflow.
        growth_factor, backoff_factor, growth_interval: as in :class:`torch.amp.GradScaler`.
        min_scale, max_scale: bounds of the scale.
        hysteresis: the number of overflows since the scale last grew at which it falls.
        hysteresis_tracker: int32, one element, ``hysteresis`` at first; needed if that is not 1;
            written.

    Raises:
        RuntimeError: an argument does not fit; nothing has been written then.

    The rule and its source are documented at ``hr_update_scale`` in ``headroom.h``.
    """
    torch.ops.headroom.update_scale_(
        scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
    )


@torch.library.register_fake("headroom::update_scale_")
def _(scale, growth_tracker, hysteresis_tracker, found_inf, **options):
    tensors = {
        "scale": (scale, torch.float32),
        "growth_tracker": (growth_tracker, torch.int32),
        "hysteresis_tracker": (hysteresis_tracker, torch.int32),
        "found_inf": (found_inf, torch.float32),
    }
    for name, (tensor, dtype) in tensors.items():
        require(
            tensor is None
            or (tensor.dtype == dtype and tensor.numel() == 1 and tensor.device == scale.device),
            f"{name} must be a {dtype} tensor of one element on {scale.device}",
        )


complete("update_scale_")
