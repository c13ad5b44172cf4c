"""Finds the model and the steps of a program that tells nothing of them, to record these."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["WatchedSteps"]


class WatchedSteps:
    """Records the steps of a program's model: the first module that is called while it trains, with
    the optimizers of its parameters, whose steps end those of the recording.

    Args:
        make: returns what records, a context with ``step()`` or without, of a model and its
            optimizers. It is entered in front of the model's first call.
        waits: whether it is too early to begin.
        most: returns after how many steps of a model the recording ends, or None.

    Attributes:
        recording: what ``make`` returned, or None before.
        optimizers: of the model.
    """

    def __init__(
        self,
        make: Callable[[nn.Module, Sequence[torch.optim.Optimizer]], Any],
        waits: Callable[[], bool],
        most: Callable[[nn.Module], int | None] = lambda model: None,
    ) -> None:
        self._make, self._waits, self._most = make, waits, most
        self.recording: Any = None
        self._runs = self._stepped = False
        self._steps, self._last = 0, None
        self.optimizers: Sequence[Any] = ()
        self._watches = register_module_forward_pre_hook(self._called)
        self._notes = register_optimizer_step_post_hook(self._noted)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording, by the error that has ended the program, if one has."""
        self._watches.remove()
        self._notes.remove()
        if self._runs:
            self._runs = False
            trace = None if error is None else error.__traceback__
            self.recording.__exit__(None if error is None else type(error), error, trace)

    def _called(self, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()) or _is_planned() or self._waits():
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        # A hook of all modules would make torch.compile trace them differently.
        self._watches.remove()
        self.optimizers, called = optimizers_of(module)
        for optimizer in called:
            # A hook of its step would run within the step, and while it runs none can be removed.
            optimizer.step = self._followed(optimizer)
        self._last = self._most(module)
        self.recording = self._make(module, self.optimizers)
        self.recording.__enter__()
        self._runs = True

    def _noted(self, optimizer: Any, *given: Any) -> None:
        self._stepped |= any(optimizer is each for each in self.optimizers)

    def _followed(self, optimizer: Any) -> MethodType:
        """Returns the ``step`` of an optimizer, which says to the recording that one has ended."""
        step = optimizer.step

        @functools.wraps(step)
        def followed(itself: Any, *given: Any, **options: Any) -> Any:
            result = step(*given, **options)
            # Of gradients that are accumulated, and by a scaler, steps are left out.
            if self._stepped and self._runs:
                self._stepped = False
                self._steps += 1
                if hasattr(self.recording, "step"):
                    self.recording.step()
                if self._steps == self._last:
                    self.end()
            return result

        return MethodType(followed, optimizer)  # as schedules of learning rates expect


def optimizers_of(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Returns the optimizers of parameters of a model and of no others; and those that a loop
    calls: in place of one, what another library has wrapped it in."""
    own = {id(p) for p in model.parameters()}
    # By type(), because proxies may do anything when they are asked.
    found: list[Any] = [
        each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)
    ]
    inner = [
        each
        for each in found
        if "optimizer" not in vars(each)
        and all(id(p) in own for group in each.param_groups for p in group["params"])
    ]
    wrappers = {id(vars(each).get("optimizer")): each for each in found}
    return inner, [wrappers.get(id(each), each) for each in inner]


def _is_planned() -> bool:
    """Returns whether a step is planned on fakes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
