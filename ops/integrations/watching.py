"""Finds the model and the steps of a program that tells nothing of them, to record these."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["WatchedSteps"]


class WatchedSteps:
    """Records the steps of a program's model: the first module that is called while it trains, with
    the optimizers of its parameters. A step ends where the model is called first after one of these
    has stepped.

    Args:
        make: returns what records, a context with ``step()`` or without, of a model and its
            optimizers. It is entered in front of the model's first call.
        waits: whether it is too early to begin.
        most: returns after how many steps of a model the recording ends, or None.

    Attributes:
        recording: what ``make`` returned, or None before.
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
        self._steps = 0
        self._optimizers: Sequence[Any] = ()
        self._hooks = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_post_hook(self._optimized),
        ]

    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording, by the error that has ended the program, if one has."""
        for hook in self._hooks:
            hook.remove()
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
        self._hooks.pop(0).remove()
        self._hooks.append(module.register_forward_pre_hook(self._began))
        self._optimizers = optimizers_of(module)
        self.recording = self._make(module, self._optimizers)
        self.recording.__enter__()
        self._runs = True

    def _began(self, module: nn.Module, args: Any) -> None:
        if not (self._stepped and self._runs):
            return
        self._stepped = False
        self._steps += 1
        if hasattr(self.recording, "step"):
            self.recording.step()
        if self._steps == self._most(module):
            self.end()

    def _optimized(self, optimizer: Any, *given: Any) -> None:
        self._stepped |= optimizer in self._optimizers


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of parameters of a model and of no others, without those of other
    libraries that wrap one."""
    own = {id(p) for p in model.parameters()}
    # By type(), because proxies may do anything when they are asked.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [
        each
        for each in found
        if "optimizer" not in vars(each)
        and all(id(p) in own for group in each.param_groups for p in group["params"])
    ]


def _is_planned() -> bool:
    """Returns whether a step is planned on fakes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
