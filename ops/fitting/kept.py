"""Keeps the contents of containers and tensors, and puts them back into the same objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from .out_of_memory import is_out_of_memory

__all__ = ["kept", "kept_attributes"]

Back = Callable[[], Any]


def kept(value: Any, *, tensors: bool = True) -> Back:
    """Returns a function that gives a value back the contents that it has now, and returns it.

    Dictionaries, lists, deques and what they hold are kept, and tensors if ``tensors`` is true; all
    else is taken for immutable. Putting back allocates no memory of a device.
    """
    if isinstance(value, Tensor):
        return _kept_tensor(value) if tensors else lambda: value
    if isinstance(value, dict):
        items = {key: kept(one, tensors=tensors) for key, one in value.items()}

        def fill() -> Any:
            found = {key: back() for key, back in items.items()}
            value.clear()
            value.update(found)
            return value

        return fill
    if isinstance(value, (list, tuple, deque)):
        members = [kept(one, tensors=tensors) for one in value]

        def extend() -> Any:
            found = [back() for back in members]
            if not isinstance(value, tuple):
                value.clear()
                value.extend(found)
            return value

        return extend
    return lambda: value


def kept_attributes(owner: Any, copied: Collection[str] = ()) -> Back:
    """Returns a function that gives an object back the attributes that it has now.

    Tensors that are attributes are kept with their values, and so are those in the containers
    ``copied``. Those in other containers are not written to by their owners.
    """
    attributes = vars(owner)
    backs = {
        name: kept(value, tensors=name in copied or isinstance(value, Tensor))
        for name, value in attributes.items()
    }

    def back() -> Any:
        found = {name: one() for name, one in backs.items()}
        attributes.clear()
        attributes.update(found)
        return owner

    return back


def _kept_tensor(tensor: Tensor) -> Back:
    with torch.no_grad():
        copy = _copy(tensor)

    def back() -> Tensor:
        with torch.no_grad():
            tensor.copy_(copy)
        return tensor

    return back


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy on the same device or, where that has no room, in the memory of the host."""
    try:
        return tensor.detach().clone()
    except RuntimeError as error:
        if tensor.is_cpu or not is_out_of_memory(error):
            raise
    return tensor.detach().cpu()
