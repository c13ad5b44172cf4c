"""Makes deep copies that look into closures; a caller says how some objects are copied."""

from __future__ import annotations

import contextlib
import copy
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_lock = threading.RLock()


def copied_modules(model: nn.Module, tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a deep copy of a model in which ``tensor(x)`` takes the place of each parameter and
    buffer ``x``. It is called once for each of them, so that tied weights stay tied; to return
    ``x`` itself shares it. All else that the modules hold is copied, functions whose closures hold
    modules too, and the model stays as it is. Copies of tensors with a graph, such as a loss that a
    block keeps, are without it.
    """
    memo = {id(x): tensor(x) for x in {*model.parameters(), *model.buffers()}}
    with deepcopy_with({Tensor: _copied_tensor}):
        return copy.deepcopy(model, memo)


def private_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with the same weights in the same memory, which can run forward
    and backward without a trace on the model: its buffers, gradients and modules are its own, and
    its parameters have none of the hooks on gradients of the model's.

    Raises:
        TypeError: something in the model cannot be copied.
    """
    try:
        return copied_modules(model, _private)
    except Exception as error:
        raise TypeError(
            f"{type(model).__name__} cannot be copied, and only a copy is measured: "
            f"{type(error).__name__}: {error}; remove from its modules what copy.deepcopy refuses"
        ) from error


def _private(x: Tensor) -> Tensor:
    if not isinstance(x, nn.Parameter):
        return x.detach().clone()
    own = nn.Parameter(x.detach(), requires_grad=x.requires_grad)
    vars(own).update(vars(x))
    return own


def _copied_tensor(x: Tensor, memo: dict[int, Any]) -> Tensor:
    if x.is_leaf:
        return x.__deepcopy__(memo)
    memo[id(x)] = copied = x.detach().clone()
    return copied


@contextlib.contextmanager
def deepcopy_with(kinds: Mapping[type, Callable[[Any, dict[int, Any]], Any]]) -> Iterator[None]:
    """Lets :func:`copy.deepcopy`, while it lasts, copy objects of some classes by the functions
    given here, which get the object and the memo; and functions that hold tensors, modules or
    optimizers in their closures by functions that hold the copies. Python's modules are not
    copied."""
    dispatch: dict[type, Callable[..., Any]] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    added = {types.FunctionType: _copied_function, types.ModuleType: _itself, **kinds}
    with _lock:
        replaced = {kind: dispatch.get(kind) for kind in added}
        dispatch.update(added)
        try:
            yield
        finally:
            for kind, function in replaced.items():
                if function is None:
                    del dispatch[kind]
                else:
                    dispatch[kind] = function


def _itself(module: types.ModuleType, memo: dict[int, Any]) -> types.ModuleType:
    return module


def _copied_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Returns the function itself, or one whose closure has copies of modules and tensors."""
    if not _holds_tensors(function, set()):
        return function
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    memo[id(function)] = copied
    for cell, old in zip(cells, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents = copy.deepcopy(old.cell_contents, memo)
    return copied


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    if isinstance(value, (Tensor, nn.Module, Optimizer)):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):
                inside.append(cell.cell_contents)
    elif isinstance(value, types.MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, (list, tuple, set)):
        inside = [*value]
    elif isinstance(value, dict):
        inside = [*value.values()]
    return any(_holds_tensors(item, seen) for item in inside)
