"""An optimizer before a step, and whether it has stepped since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._core.dtensor import local_part
from .._core.surroundings import version_of
from ..optim.base import Optimizer as HeadroomOptimizer
from .kept import kept

__all__ = ["OptimizerBefore"]

FROM_SCALER = ("grad_scale", "found_inf")  # what torch's scaler sets on an optimizer for a step
ABSENT = object()


# By optimizer: those in whose contexts a step runs. The hooks stay on an optimizer, because
# torch.compile traces a step anew when they change.
WATCHING: WeakKeyDictionary[torch.optim.Optimizer, list[OptimizerBefore]] = WeakKeyDictionary()


def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # nothing can be copied in a graph; versions tell what it has written
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: the optimizer
    for before in WATCHING.get(optimizer, ()):
        before.begin(has_closure=closure is not None)


def _end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for before in WATCHING.get(optimizer, ()):
        before.end()


class OptimizerBefore:
    """An optimizer before a training step. A context, in which the step runs.

    Headroom's optimizers write after everything has been allocated, so that nothing has to be
    copied. Others do not: with ``undo``, their parameters, states and options are copied when the
    step begins, and the copies are dropped when it ends.

    What has been written is told by the versions of the parameters, whoever wrote.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, undo: bool, on_host: bool = False) -> None:
        self._optimizer, self._undo, self._on_host = optimizer, undo, on_host
        self._is_ours = isinstance(optimizer, HeadroomOptimizer)
        self._versions = [(param, _version(param)) for param in self._params()]
        self._names = [  # by id: a tensor takes longer to be hashed
            (id(param), tuple(entry))
            for param, entry in optimizer.state.items()
            if isinstance(entry, dict)
        ]
        self._set = {name: vars(optimizer).get(name, ABSENT) for name in FROM_SCALER}
        self._backs: list[Callable[[], Any]] | None = None
        self._groups: list[Callable[[], Any]] = []
        self._own: Callable[[], Any] | None = None
        self._has_begun = self._has_ended = self._was_changed = False

    def __enter__(self) -> OptimizerBefore:
        if not self._is_ours:
            optimizer = self._optimizer
            if _begin not in optimizer._optimizer_step_pre_hooks.values():
                optimizer.register_step_pre_hook(_begin)
                optimizer.register_step_post_hook(_end)
            WATCHING.setdefault(optimizer, []).append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._is_ours:
            WATCHING[self._optimizer].remove(self)

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def begin(self, has_closure: bool) -> None:
        """Copies what the step of the optimizer, which begins, is about to write."""
        optimizer = self._optimizer
        if self._undo and not self._has_ended:
            if not self._has_begun:  # else a step inside this one has undone what it wrote
                self._was_changed = self._has_changed()
            self._backs = None
            params, on_host = self._params(), self._on_host
            written = [p for p in params if has_closure or p.grad is not None]
            self._groups = [kept(_options(group)) for group in optimizer.param_groups]
            self._own = kept(_attributes(optimizer), on_host=on_host, but=params)
            values = [*written, optimizer.state]
            self._backs = [kept(value, on_host=on_host) for value in values]
        self._has_begun = True

    def end(self) -> None:
        """Drops the copies: the optimizer has stepped."""
        self._backs = self._own = None
        self._groups, self._has_ended = [], True

    @property
    def _release(self) -> Any:
        """The handle of gradients that are released, or None."""
        return self._optimizer.release_handle if self._is_ours else None

    def _has_changed(self) -> bool:
        return any(_version(param) != version for param, version in self._versions)

    @property
    def copies_took_room(self) -> bool:
        """Whether the step failed beside copies that are on its device."""
        if self._backs is None or self._on_host:
            return False
        return any(_is_on_device(param) for param in self._params())

    def lost(self) -> str | None:
        """Returns what the step has changed for good, or None."""
        kind = type(self._optimizer).__name__
        stepped = f"parameters, which {kind} has stepped"
        if self._has_ended or (self._release is not None and self._release.has_stepped):
            return stepped
        if self._was_changed:
            return f"parameters of {kind} before its step"
        if self._has_begun:
            half = f"parameters or states of {kind}, whose step may be half done"
            return half if self._backs is None else None
        return stepped if self._has_changed() else None

    def restore(self) -> None:
        """Undoes a step that was begun."""
        optimizer = self._optimizer
        for back in self._backs or ():
            back()
        for group, back in zip(optimizer.param_groups, self._groups):
            _put_back(group, _options(group), back())
        if self._own is not None:
            _put_back(vars(optimizer), _attributes(optimizer), self._own())
        if self._is_ours:
            self._drop_new_states()
        for name, value in self._set.items():
            if value is not ABSENT:
                setattr(optimizer, name, value)
            elif name in vars(optimizer):
                delattr(optimizer, name)
        if self._release is not None:
            self._release.abandon()

    def _drop_new_states(self) -> None:
        state, before = self._optimizer.state, dict(self._names)
        for param in list(state):
            entry, names = state[param], before.get(id(param))
            if names is None:
                del state[param]
            elif len(entry) > len(names):
                for name in entry.keys() - set(names):
                    del entry[name]


def _version(param: Tensor) -> int | None:
    return version_of(local_part(param))


def _is_on_device(param: Tensor) -> bool:
    return not param.is_cpu


def _put_back(owner: dict[str, Any], now: dict[str, Any], before: dict[str, Any]) -> None:
    """Gives a dictionary the entries from before in place of those that it has now."""
    for name in now.keys() - before.keys():
        del owner[name]
    owner.update(before)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a class of optimizers keeps besides what all of them have."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "defaults") and not name.startswith("_optimizer_")
    }
