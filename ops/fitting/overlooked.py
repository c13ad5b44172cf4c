"""Finds what a step uses that would not be as it was when the step is repeated."""

from __future__ import annotations

import dis
import functools
import io
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..grad.accumulate import GradAccumulator
from .training import Training, unwrapped

__all__ = ["refuse_overlooked"]


def refuse_overlooked(step: Callable[..., Any], training: Training) -> None:
    """Refuses a function that uses an optimizer, a scaler or an accumulator that is not known, or
    that draws from an iterator. Looks at variables of the function, and at attributes of the object
    whose method it is; what is further away is not seen.

    Raises:
        TypeError: there is such a variable. Says which one, and what to do.
    """
    for name, value in _variables(step):
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise TypeError(
                f"retry_on_oom: the step uses {name}, an iterator, which would give it other data "
                "when it is repeated; draw from it outside, and give the step what was drawn"
            )
        missing = _missing(value, training)
        if missing is not None:
            raise TypeError(
                f"retry_on_oom: the step uses {name}, which would not be restored before it is "
                f"repeated; give it as {missing}="
            )


def _missing(value: Any, training: Training) -> str | None:
    """The argument that is missing if a step changes ``value``."""
    if isinstance(value, Optimizer):
        return None if unwrapped(value) in training.optimizers else "optimizer"
    if isinstance(value, GradScaler) and value.is_enabled():
        return None if value is training.scaler else "scaler"
    if isinstance(value, GradAccumulator):
        return None if value is training.accumulator else "accumulator"
    return None


def _variables(step: Any) -> Iterator[tuple[str, Any]]:
    """Yields the variables that a function takes from around it, with their names."""
    while isinstance(step, functools.partial):
        step = step.func
    if not hasattr(step, "__code__") and not hasattr(step, "__func__"):
        step = step.__call__  # of an object
    owner = getattr(step, "__self__", None)
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    attributes = getattr(owner, "__dict__", {})
    for kind, name in _names(code):
        if kind == "LOAD_GLOBAL" and name in function.__globals__:
            yield name, function.__globals__[name]
        elif kind != "LOAD_GLOBAL" and name in attributes:
            yield f"self.{name}", attributes[name]


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yields the names of globals, attributes and methods in a function and in those inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"):
            yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
