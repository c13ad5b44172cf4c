"""The gradients before a step, copied only where the step is about to write over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

__all__ = ["GradientsBefore"]


@dataclasses.dataclass(slots=True)
class _Gradient:
    """A gradient that was there before the step.

    Attributes:
        version: that it had then.
        copy: what it was when backward first added to it.
        was_set: whether the step itself had written to it by then.
    """

    tensor: TensorWeakRef
    version: int
    copy: Tensor | None = None
    was_set: bool = False


class GradientsBefore:
    """The gradients before a step. They are copied when backward is about to add to them, and not
    at all if the step begins by dropping them."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._found = [
            None if (grad := param.grad) is None else _Gradient(TensorWeakRef(grad), grad._version)
            for param in self._params
        ]
        self._hooks: list[Any] = []

    def __enter__(self) -> GradientsBefore:
        for param, found in zip(self._params, self._found):
            if found is not None and param.requires_grad:
                self._hooks.append(param.register_hook(partial(self._copy, param, found)))
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @staticmethod
    def _copy(param: Tensor, found: _Gradient, incoming: Tensor) -> None:
        grad = param.grad
        if grad is not None and found.copy is None and found.tensor() is grad:
            found.was_set = grad._version != found.version
            found.copy = grad.detach().clone()

    def lost(self) -> str | None:
        """Returns which gradient the step has changed for good, or None."""
        for param, found in zip(self._params, self._found):
            if found is None or (grad := found.tensor()) is None:
                continue  # the step drops the gradients of the step before it
            was_set = found.was_set if found.copy is not None else grad._version != found.version
            # One that was set to 0 will be set to 0 again.
            if was_set and (grad if found.copy is None else found.copy).any():
                return f"the gradient of a parameter of shape {tuple(param.shape)}"
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the parameters their gradients back, and drops those of the step."""
        for param, found in zip(self._params, self._found):
            grad = None if found is None else found.tensor()
            if found is not None and found.copy is not None:
                grad = found.copy if grad is None else grad.copy_(found.copy)
            param.grad = grad
