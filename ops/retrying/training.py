"""Holds what a training step works on, and gives it back what it was before the step."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._core.dtensor import local_part
from .._core.surroundings import version_of
from ..grad.accumulate import GradAccumulator
from ..optim.base import Optimizer as HeadroomOptimizer
from ..patching.changes import patched_names
from ..step.pytree import map_tensors
from ..step.restoring import ModelBefore

KINDS = {"optimizer": Optimizer, "scaler": GradScaler, "accumulator": GradAccumulator}
LARGE = 1 << 24  # bytes of a buffer that is not copied before every step
FROM_SCALER = ("grad_scale", "found_inf")  # what torch's scaler sets on an optimizer for a step


class Training:
    """The objects that a training step changes: the arguments of :func:`headroom.retry_on_oom`.

    Attributes:
        begun, ended: the classes of optimizers that are not Headroom's, which write while they
            allocate, one for each of their steps that has begun, and ended.

    Raises:
        TypeError: an argument is of another class.
    """

    def __init__(self, model: Any, optimizer: Any, scaler: Any, accumulator: Any) -> None:
        several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.model, self.scaler, self.accumulator = model, scaler, accumulator
        self.optimizers = [_unwrapped(one) for one in several]
        options = [("scaler", scaler), ("accumulator", accumulator)]
        given = [("optimizer", one) for one in self.optimizers]
        given += [option for option in options if option[1] is not None]
        for name, value in [("model", model), *given]:
            kind = KINDS.get(name, nn.Module)
            if not isinstance(value, kind):
                raise TypeError(f"retry_on_oom: {name} is {value!r}, wanted a {kind.__name__}")
        self.begun, self.ended = list[str](), list[str]()
        for one in self.optimizers:
            if not isinstance(one, HeadroomOptimizer):
                # They stay, because torch.compile traces a step anew when they change.
                one.register_step_pre_hook(partial(_note, self.begun))
                one.register_step_post_hook(partial(_note, self.ended))

    def refuse_unknown(self, step: Callable[..., Any]) -> None:
        """Refuses a function that has an iterator among its variables, or an optimizer, a scaler or
        an accumulator that was not given, also as an attribute of the object whose method it is.
        What is further away is not seen."""
        step = step.func if isinstance(step, partial) else step
        owner = getattr(getattr(step, "__self__", step), "__dict__", {})
        seen = {f"self.{name}": value for name, value in owner.items() if not _is_drawn(value)}
        with suppress(TypeError, ValueError):  # no function, or a variable has no value yet
            found = inspect.getclosurevars(getattr(step, "__func__", step))
            seen |= {**found.globals, **found.nonlocals}
        known = [*self.optimizers, self.scaler, self.accumulator]
        for name, value in seen.items():
            if _is_drawn(value):
                raise TypeError(
                    f"retry_on_oom: the step uses {name}, an iterator, which would give it other "
                    "data when it is repeated; draw from it outside, and give the step the data"
                )
            missing = [word for word, kind in KINDS.items() if isinstance(value, kind)]
            if missing and not any(_unwrapped(value) is x for x in known):
                raise TypeError(
                    f"retry_on_oom: the step uses {name}, which would not be restored before it is "
                    f"repeated; give it as {missing[0]}="
                )


def _is_drawn(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _note(kinds: list[str], optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():  # versions of parameters tell what a graph has done
        kinds.append(type(optimizer).__name__)


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer in wrappers such as accelerate's, which is an Optimizer too."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


class BeforeTraining(ModelBefore):
    """Keeps what a training is before a step. A context, in which the step runs."""

    def __init__(self, training: Training) -> None:
        super().__init__(training.model, LARGE, patched_names)
        self._training = training

    def keep_all(self) -> None:
        """Keeps everything. If this itself runs out of memory, nothing has been changed, and what
        has been kept so far can be restored."""
        training = self._training
        training.begun.clear()
        training.ended.clear()
        # By id: a tensor takes longer to be hashed.
        owned = (p for module in self._modules for p in module._parameters.values())
        params = {id(param): (param, "") for param in owned if param is not None}
        for optimizer in training.optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups:
                params |= {id(param): (param, kind) for param in group["params"]}
        self.keep(param for param, _ in params.values())
        seen = [(param, kind, version_of(local_part(param))) for param, kind in params.values()]
        self._checks.append(partial(_written, self._model, seen))
        for optimizer in training.optimizers:
            self._keep_optimizer(optimizer)
        if training.scaler is not None:
            attributes = vars(training.scaler)
            self._backs.append(partial(attributes.update, map_tensors(attributes, _copied)))
        if training.accumulator is not None:
            sums = map_tensors(training.accumulator.state_dict(), _copied)
            self._backs.append(partial(training.accumulator.load_state_dict, sums))

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        """Keeps what there was before a step that writes nothing: without its new states, without
        what a scaler has set, and without gradients that wait to be released."""
        attributes, release = vars(optimizer), getattr(optimizer, "_release_handle", None)
        was_set = {name: attributes[name] for name in FROM_SCALER if name in attributes}
        state = optimizer.state if isinstance(optimizer, HeadroomOptimizer) else {}
        names = {id(param): set(entry) for param, entry in state.items()}

        def back() -> None:
            for name in FROM_SCALER:
                attributes.pop(name, None)
            attributes.update(was_set)
            for param, entry in [*state.items()]:
                for name in entry.keys() - names.get(id(param), set()):
                    del entry[name]
                if id(param) not in names:
                    del state[param]
            if release is not None:
                release.abandon()

        self._backs.append(back)
        if release is not None:
            stepped = f"parameters, which {type(optimizer).__name__} has stepped"
            self._checks.append(lambda: stepped if release.has_stepped else None)

    def refusal(self) -> str | None:
        """Returns why the step cannot be repeated, or None if everything can be restored."""
        begun, ended = self._training.begun, self._training.ended
        if len(begun) > len(ended):
            return (
                f"the step cannot be repeated, since that of {begun[-1]} failed half way, and its "
                "state and its parameters may be half written: load the last state that was saved, "
                "and use headroom.optim, whose optimizers allocate everything before they write"
            )
        lost = f"parameters, which {ended[0]} has stepped" if ended else self.lost()
        return lost and (
            f"the step cannot be repeated, since it has changed {lost}; what the step does after "
            "that has not been done"
        )


def _written(model: nn.Module, seen: Iterable[tuple[Tensor, str, int | None]]) -> str | None:
    """Returns which parameter has been written to, of those with the class of their optimizer, or
    "", and the version that they had; or None."""
    for param, kind, version in seen:
        if version_of(local_part(param)) != version:
            if kind:
                return f"parameters, which {kind} has stepped"
            name = next(name for name, p in model.named_parameters() if p is param)
            return f"parameter {name}, which none of the optimizers has that it was given"
    return None


def _copied(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.clone()  # a scaler remembers parameters, too
