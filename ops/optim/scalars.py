"""The scalars of a step: the scale of its gradients, whether to skip, how much to clip."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["StepScalars"]


class StepScalars(NamedTuple):
    """Tensors of one element that a step reads without waiting for the device."""

    grad_scale: Tensor | None = None  # gradients are divided by it
    found_inf: Tensor | None = None  # the step changes nothing if it is not 0
    clip_coef: Tensor | None = None  # gradients are multiplied by it

    def joined(
        self, found_inf: Tensor | None = None, clip_coef: Tensor | None = None
    ) -> StepScalars:
        """Returns the scalars of a step that either flag skips, and both factors clip."""
        if found_inf is not None and self.found_inf is not None:
            found_inf = torch.maximum(found_inf, self.found_inf.to(found_inf.device))
        if clip_coef is not None and self.clip_coef is not None:
            clip_coef = clip_coef * self.clip_coef.to(clip_coef.device)
        return self._replace(
            found_inf=self.found_inf if found_inf is None else found_inf,
            clip_coef=self.clip_coef if clip_coef is None else clip_coef,
        )

    def on(self, device: torch.device) -> dict[str, Tensor | None]:
        """Returns the arguments of an op on this device."""
        return {
            name: None if scalar is None else scalar.to(device, torch.float32)
            for name, scalar in zip(self._fields, self)
        }
