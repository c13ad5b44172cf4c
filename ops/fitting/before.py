"""What a training step must find as it was, to be repeated as if it had not been tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from .._core.surroundings import Buffers, version_of
from ..state.generators import generator_states, restore_generators
from .gradients_before import GradientsBefore
from .kept import kept_attributes
from .modules_before import ModulesBefore
from .optimizer_before import OptimizerBefore
from .pending import Pending
from .training import Training

__all__ = ["Before"]

LARGE = 1 << 24  # bytes of a buffer that is not copied before every step


class _Part(Protocol):
    """A part of what a training is."""

    def lost(self) -> str | None:
        """Returns what the step has changed for good, or None if it can be restored."""
        ...

    def restore(self) -> None:
        """Puts the part back."""
        ...


class Before(contextlib.ExitStack):
    """What a training is before a step. A context, in which the step runs.

    Generators, attributes and buffers of modules, the scaler and the accumulator are kept at its
    start; gradients and optimizers only where the step is about to write over something.
    """

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training
        self._parts: list[_Part] = []
        self._optimizers: list[OptimizerBefore] = []
        self._backs: list[Callable[[], Any]] = []
        self._pending: Pending | None = None

    def keep(self) -> None:
        """Keeps everything. If this itself runs out of memory, nothing has been changed, and what
        has been kept so far can be restored."""
        training = self._training
        self._pending = Pending()
        self._backs.append(partial(restore_generators, generator_states()))
        self._add(Buffers([training.model], LARGE))
        modules = training.modules()
        self._add(ModulesBefore(modules))
        params = training.params(modules)
        self._add(self.enter_context(GradientsBefore(params)))
        for optimizer in training.optimizers:
            before = OptimizerBefore(optimizer, training.undo, training.copies_on_host)
            self._optimizers.append(self.enter_context(before))
            self._add(before)
        self._add(_OtherParameters(training, params))
        if training.scaler is not None:
            self._backs.append(kept_attributes(training.scaler))
        if training.accumulator is not None:
            self._backs.append(kept_attributes(training.accumulator, ("_sums", "_compensations")))

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._backs.append(part.restore)

    def free_pending(self) -> None:
        """Frees what the backward pass of a failed attempt has left to be run."""
        if self._pending is not None:
            self._pending.free()
            self._pending = None

    @property
    def copies_took_room(self) -> bool:
        """Whether an optimizer failed beside copies of what it writes that are on its device."""
        return any(optimizer.copies_took_room for optimizer in self._optimizers)

    def lost(self) -> str | None:
        """Returns what the step has changed for good, or None if it can be restored."""
        return next((text for part in reversed(self._parts) if (text := part.lost())), None)

    def restore(self) -> None:
        """Puts everything back."""
        for back in reversed(self._backs):
            back()


class _OtherParameters:
    """The parameters that none of the optimizers has, to which a step does not write."""

    def __init__(self, training: Training, params: Iterable[Tensor]) -> None:
        theirs = {
            id(param)
            for optimizer in training.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }
        self._model = training.model
        self._seen = [(param, version_of(param)) for param in params if id(param) not in theirs]

    def lost(self) -> str | None:
        changed = [param for param, version in self._seen if version_of(param) != version]
        if not changed:
            return None
        name = next(name for name, param in self._model.named_parameters() if param is changed[0])
        return f"parameter {name}, which none of the optimizers has that it was given"

    def restore(self) -> None:
        pass
