"""Clips by the norm of all gradients, though a step knows them only one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from ...grad.norm import clip_coef
from .stepping import Stepping

__all__ = ["ByPreviousNorm", "TwoPass"]


class ByPreviousNorm(Stepping):
    """``clip="previous"``: clips by the norm of the previous step."""

    _needs_norms = True

    def check(self) -> None:
        _check_limit("previous", self.max_norm)

    def _clip_coef(self) -> Tensor | None:
        return None if self.norm is None else clip_coef(self.norm, self.max_norm)

    def _keep_norm(self, norm: Tensor) -> None:
        before = torch.zeros_like(norm) if self.norm is None else self.norm
        self.norm = torch.where(norm.isfinite(), norm, before.to(norm.device))


class TwoPass(Stepping):
    """``clip="two-pass"``: clips by the norm that a first backward has measured."""

    def check(self) -> None:
        _check_limit("two-pass", self.max_norm)

    def _check_measured(self) -> None:
        if self._verdict is None:
            raise RuntimeError("clip='two-pass' needs a backward under measure() before this one")


def _check_limit(clip: str, max_norm: float | None) -> None:
    if max_norm is None:
        raise ValueError(f"clip={clip!r} needs an optimizer with max_grad_norm")
