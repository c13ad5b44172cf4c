"""An optimizer before a step, and whether it has stepped since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..optim.base import Optimizer as HeadroomOptimizer
from .kept import kept

__all__ = ["OptimizerBefore"]

FROM_SCALER = ("grad_scale", "found_inf")  # what torch's scaler sets on an optimizer for a step
ABSENT = object()


class OptimizerBefore:
    """An optimizer before a training step. A context, in which the step runs.

    Headroom's optimizers write after everything has been allocated, so that nothing has to be
    copied. Those of torch do not: with ``undo``, their parameters, states and options are copied
    when the step begins, and the copies are dropped when it ends.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, undo: bool) -> None:
        self._optimizer, self._undo = optimizer, undo
        self._names = {param: tuple(entry) for param, entry in optimizer.state.items()}
        self._set = {name: vars(optimizer).get(name, ABSENT) for name in FROM_SCALER}
        self._backs: list[Callable[[], Any]] | None = None
        self._groups: list[Callable[[], Any]] = []
        self._has_begun = self._has_ended = False
        self._hooks: list[Any] = []

    def __enter__(self) -> OptimizerBefore:
        optimizer = self._optimizer
        if isinstance(optimizer, HeadroomOptimizer):
            optimizer._has_written = False
        else:
            self._hooks.append(optimizer.register_step_pre_hook(self._begin))
            self._hooks.append(optimizer.register_step_post_hook(self._end))
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._undo and not self._has_ended:
            has_closure = bool(args) or kwargs.get("closure") is not None
            groups = optimizer.param_groups
            self._groups = [kept(_options(group)) for group in groups]
            backs = [
                kept(param)
                for group in groups
                for param in group["params"]
                if has_closure or param.grad is not None
            ]
            self._backs = backs + [kept(entry) for entry in optimizer.state.values()]
        self._has_begun = True

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._backs, self._groups, self._has_ended = None, [], True

    def lost(self) -> str | None:
        """Returns what the step has changed for good, or None."""
        kind, optimizer = type(self._optimizer).__name__, self._optimizer
        if isinstance(optimizer, HeadroomOptimizer):
            release = optimizer._release
            if optimizer._has_written or (release is not None and release.has_stepped):
                return f"parameters, which {kind} has stepped"
            return None
        if self._has_ended:
            return f"parameters, which {kind} has stepped"
        if self._has_begun and self._backs is None:
            return f"parameters or states of {kind}, whose step may be half done"
        return None

    def restore(self) -> None:
        """Undoes a step that was begun."""
        optimizer = self._optimizer
        for back in self._backs or ():
            back()
        for group, back in zip(optimizer.param_groups, self._groups):
            options = back()
            for name in _options(group).keys() - options.keys():
                del group[name]
            group.update(options)
        for param in list(optimizer.state):
            entry, names = optimizer.state[param], self._names.get(param)
            if names is None:
                del optimizer.state[param]
            elif len(entry) > len(names):
                for name in entry.keys() - set(names):
                    del entry[name]
        for name, value in self._set.items():
            if value is not ABSENT:
                setattr(optimizer, name, value)
            elif name in vars(optimizer):
                delattr(optimizer, name)
        if isinstance(optimizer, HeadroomOptimizer) and optimizer._release is not None:
            optimizer._release.abandon()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
