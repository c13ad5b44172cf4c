"""Gives a program that knows nothing of Headroom its optimizers by name, and a budget to its loops,
when it imports the library of its loop: nothing is imported sooner, or in another order."""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from .trainer_optimizers import add_handlers, add_names

__all__ = ["Budget", "UnknownLoop", "after_import", "register_later"]

TRAINER, LIGHTNING = "transformers.trainer", "lightning.pytorch.trainer.trainer"


def register_later() -> None:
    """Adds the names of Headroom's optimizers to transformers when a program imports that."""
    after_import("transformers.training_args", add_names)
    after_import("transformers.trainer_optimizer", add_handlers)


class UnknownLoop(RuntimeError):
    """An optimizer steps in a loop that nothing here can fit into a budget."""


class Budget:
    """A budget of memory for every training of a process by the Trainer of transformers or of
    Lightning: each of them that is made gets the callback that calls :func:`headroom.fit`, unless
    the program gave it one.

    Args:
        budget, allow, host_budget: as in :class:`headroom.integrations.loops.FitsLoop`.

    Attributes:
        callbacks: those of the Trainers that were made.
    """

    def __init__(
        self, budget: int | str, allow: Sequence[str] = (), host_budget: int | str | None = None
    ) -> None:
        self.callbacks: list[Any] = []
        self._options = {"budget": budget, "allow": allow, "host_budget": host_budget}
        after_import(TRAINER, self._attach_to_transformers)
        after_import(LIGHTNING, self._attach_to_lightning)
        self._guard = register_optimizer_step_pre_hook(self._refuse)

    @property
    def is_waiting(self) -> bool:
        """Returns whether no training was planned yet, or its first steps are being measured."""
        return not self.callbacks or any(
            each.fitted is None or each.measured is None or not each.measured.has_ended
            for each in self.callbacks
        )

    def _attach_to_transformers(self, module: ModuleType) -> None:
        def attach(trainer: Any) -> Any:
            from .trainer_fit import ATTACHED, HeadroomCallback

            if ATTACHED not in vars(trainer):
                callback = HeadroomCallback(**self._options)
                trainer.add_callback(callback)
                callback.attach(trainer)
            return vars(trainer)[ATTACHED]

        self._wrap(module, attach)

    def _attach_to_lightning(self, module: ModuleType) -> None:
        def attach(trainer: Any) -> Any:
            from .lightning import FitCallback

            if not any(isinstance(each, FitCallback) for each in trainer.callbacks):
                trainer.callbacks.insert(0, FitCallback(**self._options))
            return next(each for each in trainer.callbacks if isinstance(each, FitCallback))

        self._wrap(module, attach)

    def _wrap(self, module: ModuleType, attach: Callable[[Any], Any]) -> None:
        own = module.Trainer.__init__

        @functools.wraps(own)
        def made(trainer: Any, *given: Any, **options: Any) -> None:
            own(trainer, *given, **options)
            self.callbacks.append(attach(trainer))
            self._guard.remove()

        module.Trainer.__init__ = made

    def _refuse(self, optimizer: Any, *given: Any) -> None:
        """Refuses the first step of a loop that nothing here can plan."""
        raise UnknownLoop(
            f"a budget was given, and {type(optimizer).__name__} steps in a loop that belongs "
            "neither to the Trainer of transformers nor to that of Lightning, so that nothing fits "
            "it into the budget: call headroom.fit in the program, in a loop of accelerate "
            "headroom.integrations.accelerate.fit, or leave the budget out"
        )


def after_import(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Calls a function with a module when a program has imported it; now, if it has."""
    if name in sys.modules:
        function(sys.modules[name])
        return
    sys.meta_path.insert(0, _Finder(name, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, once, and calls a function after it has run."""

    def __init__(self, name: str, function: Callable[[ModuleType], Any]) -> None:
        self._name, self._function = name, function

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        found = None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            found = finder.find_spec(fullname, path, target)
            if found is not None:
                break
        loader: Any = None if found is None else found.loader
        if loader is not None:
            own = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                own(module)
                self._function(module)

            loader.exec_module = exec_module
        return found
