"""What a training step must find as it was, to be repeated as if it had not been tried."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._core.surroundings import Buffers
from ..grad.accumulate import GradAccumulator
from ..state.generators import generator_states, restore_generators
from .kept import kept_attributes
from .optimizer_before import OptimizerBefore

__all__ = ["Before", "Training"]

LARGE = 1 << 24  # bytes of a buffer that is not copied before every step


@dataclasses.dataclass(frozen=True)
class Training:
    """What a training step changes.

    Attributes:
        undo: whether optimizers that write before they have allocated everything are copied.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: GradScaler | None = None
    accumulator: GradAccumulator | None = None
    undo: bool = True

    @property
    def params(self) -> list[Tensor]:
        """The parameters, each once."""
        found: dict[Tensor, None] = dict.fromkeys(self.model.parameters())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found |= dict.fromkeys(group["params"])
        return list(found)


class Before(contextlib.ExitStack):
    """What a training is before a step. A context, in which the step runs.

    Generators, buffers, the scaler and the accumulator are copied at its start; gradients and
    optimizers only where the step is about to write over something.
    """

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training
        self._lost: list[Callable[[], str | None]] = []
        self._backs: list[Callable[[], Any]] = []

    def keep(self) -> None:
        """Keeps everything. If this itself runs out of memory, nothing has been changed, and what
        has been kept so far can be restored."""
        training = self._training
        self._backs.append(partial(restore_generators, generator_states()))
        buffers = Buffers([training.model], LARGE)
        self._add(buffers)
        self._add(self.enter_context(GradientsBefore(training.params)))
        for optimizer in training.optimizers:
            self._add(self.enter_context(OptimizerBefore(optimizer, training.undo)))
        if training.scaler is not None:
            self._backs.append(kept_attributes(training.scaler))
        if training.accumulator is not None:
            self._backs.append(kept_attributes(training.accumulator, ("_sums", "_losts")))

    def _add(self, one: Any) -> None:
        self._lost.append(one.lost)
        self._backs.append(one.restore)

    def lost(self) -> str | None:
        """Returns what the step has changed for good, or None if it can be restored."""
        return next((text for one in self._lost if (text := one()) is not None), None)

    def restore(self) -> None:
        """Puts everything back."""
        for back in self._backs:
            back()


@dataclasses.dataclass
class _Gradient:
    """A gradient that was there before the step.

    Attributes:
        version: that it had then.
        copy: what it was when backward first added to it.
        was_set: whether the step itself had written to it by then.
    """

    tensor: weakref.ref[Tensor]
    version: int
    copy: Tensor | None = None
    was_set: bool = False


class GradientsBefore:
    """The gradients before a step. They are copied when backward is about to add to them, and not
    at all if the step begins by dropping them."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._found: dict[Tensor, _Gradient | None] = {}
        self._hooks = contextlib.ExitStack()
        for param in params:
            grad = param.grad
            self._found[param] = None
            if grad is not None:
                self._found[param] = _Gradient(weakref.ref(grad), grad._version)

    def __enter__(self) -> GradientsBefore:
        for param, found in self._found.items():
            if found is not None and param.requires_grad:
                hook = param.register_hook(partial(self._copy, param, found))
                self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *raised: object) -> None:
        self._hooks.close()

    @staticmethod
    def _copy(param: Tensor, found: _Gradient, incoming: Tensor) -> None:
        grad = param.grad
        if grad is not None and found.copy is None and found.tensor() is grad:
            found.was_set = grad._version != found.version
            found.copy = grad.detach().clone()

    def lost(self) -> str | None:
        for param, found in self._found.items():
            if found is None or (grad := found.tensor()) is None:
                continue  # the step drops the gradients of the step before it
            was_set = found.was_set if found.copy is not None else grad._version != found.version
            # One that was set to 0 will be set to 0 again.
            if was_set and (grad if found.copy is None else found.copy).any():
                return f"the gradient of a parameter of shape {tuple(param.shape)}"
        return None

    @torch.no_grad()
    def restore(self) -> None:
        for param, found in self._found.items():
            grad = None if found is None else found.tensor()
            if found is not None and found.copy is not None:
                grad = found.copy if grad is None else grad.copy_(found.copy)
            param.grad = grad
