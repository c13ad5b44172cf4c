"""Measures the norm of each gradient as it is ready, and then the norm of all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...functional.unscale_norm import grad_norm
from ...grad.norm import Measured, are_local, clip_coef, measure
from ..base import Optimizer
from ..errors import explained
from ..plan import like_param

__all__ = ["Norms"]


class Norms:
    """The norms of the gradients of a step, each with all its shards."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parts: list[tuple[list[Tensor], Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def params(self) -> list[Tensor]:
        """Returns the parameters whose gradients were measured."""
        return [param for params, _ in self._parts for param in params]

    def measure(self, params: list[Tensor], grad_scale: Tensor | None) -> Tensor:
        """Returns the norm of each gradient, infinite or NaN if one of its elements is."""
        grads, scale = [like_param(param.grad, param) for param in params], grad_scale
        try:
            if are_local(grads):
                device = grads[0].device
                norms = torch.zeros(len(grads), dtype=torch.float32, device=device)
                scale = None if scale is None else scale.to(device, torch.float32)
                grad_norm(grads, norms=norms, grad_scale=scale)
            else:
                home = grads[0].device
                parts = [measure([grad], grad_scale=scale).norm for grad in grads]
                norms = torch.stack([part.to(home) for part in parts])
        except (RuntimeError, NotImplementedError) as error:
            raise explained(self._optimizer, error, params, grads) from error
        self._parts.append((params, norms))
        return norms

    def total(self, max_norm: float | None) -> Measured:
        """Returns what :func:`headroom.grad.norm.measure` would, of all gradients together."""
        if not self._parts:
            return measure([])
        home = self._parts[0][1].device
        norms = torch.cat([part.to(home) for _, part in self._parts]).double()
        norm, flags = torch.linalg.vector_norm(norms), ~norms.isfinite()
        coef = clip_coef(norm, math.inf if max_norm is None else max_norm)
        culprit = torch.where(flags.any(), flags.float().argmax(), -1)
        where = range(len(norms))
        return Measured(norm.float(), flags.any().float(), coef.float(), [(where, culprit)])
