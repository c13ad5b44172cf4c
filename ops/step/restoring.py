"""Gives a model back what it was before a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from .._core.randomness import generator_states, restore_generators
from .._core.surroundings import Buffers

__all__ = ["ModelBefore"]

# The containers of every module, and where a block of headroom.nn has its level.
NOT_RESTORED = {"_level", *(name for name in vars(nn.Module()) if name.startswith("_"))}


Settings = Callable[[dict[str, Any]], set[str]]


class ModelBefore(contextlib.ExitStack):
    """Keeps what a model is before a step: random numbers, buffers, attributes of modules and
    gradients. A context, in which the step runs.

    Args:
        limit: buffers of more bytes are not copied; whether they change is seen.
        settings: returns which of the attributes of a module are settings, and stay.
    """

    def __init__(
        self, model: nn.Module, limit: int | None = None, settings: Settings = lambda _: set()
    ) -> None:
        super().__init__()
        self._settings = settings
        self._model, self._modules, self._limit = model, list(model.modules()), limit
        self._checks: list[Callable[[], str | None]] = []
        self._backs: list[Callable[[], Any]] = []
        self._oldest: Tensor | None = None

    def keep(self, params: Iterable[Tensor] = ()) -> None:
        """Keeps everything. If this itself runs out of memory, nothing has been changed, and what
        has been kept so far can be restored.

        Args:
            params: those whose gradients are kept.
        """
        with torch.inference_mode(False), torch.enable_grad():
            self._oldest = torch.zeros((), device="cpu", requires_grad=True) * 1
        self._backs.append(partial(restore_generators, generator_states()))
        buffers = Buffers([self._model], self._limit)
        self._checks.append(buffers.lost)
        self._backs += [buffers.restore, _attributes_before(self._modules, self._settings)]
        for param in params:
            self._keep_gradient(param)

    def _keep_gradient(self, param: Tensor) -> None:
        """Keeps a gradient: copied when a backward pass is about to add to it, and not at all if
        the step begins by dropping it."""
        if param.grad is None:
            self._backs.append(partial(setattr, param, "grad", None))
            return
        held, version = TensorWeakRef(param.grad), param.grad._version
        copies: list[tuple[Tensor, bool]] = []  # the copy, and whether the step had written to it

        def copy(incoming: Tensor) -> None:
            grad = param.grad
            if grad is not None and not copies and held() is grad:
                copies.append((grad.detach().clone(), grad._version != version))

        def lost() -> str | None:
            if (grad := held()) is None:  # the step drops the gradients of the step before it
                return None
            value, is_set = copies[0] if copies else (grad, grad._version != version)
            # What was set to 0 will be set to 0 again.
            what = f"the gradient of a parameter of shape {tuple(param.shape)}"
            return what if is_set and value.any() else None

        def back() -> None:
            grad = held()
            for value, _ in copies:
                grad = value if grad is None else grad.copy_(value)
            param.grad = grad

        if param.requires_grad:
            self.callback(param.register_hook(copy).remove)
        self._checks.append(lost)
        self._backs.append(back)

    def free_pending(self) -> None:
        """Frees what a backward pass that has failed leaves in the queue of its thread.

        Nodes that were ready to run when another one, or a hook on a parameter, raised stay there,
        with their gradients and all of the graph behind them, until a later pass comes to them. The
        youngest nodes run first, so a pass of a node that is older than all of them takes them out;
        they are not run. (Devices have threads of their own, which never rest.)
        """
        if self._oldest is not None:
            self._oldest.backward()

    def lost(self) -> str | None:
        """Returns what the step has changed for good, or None if everything can be restored."""
        return next((text for check in reversed(self._checks) if (text := check())), None)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, the last that was kept first."""
        for back in reversed(self._backs):
            back()


def _attributes_before(modules: Iterable[nn.Module], settings_of: Settings) -> Callable[[], None]:
    """Returns a function that gives modules the attributes that they have now, such as counters and
    recurrent states, and no others; what lists and dictionaries among them hold is not looked at.
    Settings stay, such as levels.

    Results of a graph, such as a loss that a module leaves for the step to pick up, are not kept
    alive: if the step has replaced them, they become None.
    """
    seen = [
        (
            attributes := vars(module),
            settings_of(attributes),
            {
                name: value if getattr(value, "grad_fn", None) is None else TensorWeakRef(value)
                for name, value in attributes.items()
                if name not in NOT_RESTORED
            },
        )
        for module in modules
    ]

    def back() -> None:
        for attributes, settings, before in seen:
            settings = settings | settings_of(attributes) | NOT_RESTORED
            for name in attributes.keys() - before.keys() - settings:
                del attributes[name]
            for name in before.keys() - settings:
                held = before[name]
                attributes[name] = held() if isinstance(held, TensorWeakRef) else held

    return back
