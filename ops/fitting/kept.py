"""Keeps the contents of containers and tensors, and puts them back into the same objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ..step.out_of_memory import is_out_of_memory

__all__ = ["kept", "kept_attributes"]

Back = Callable[[], Any]


def kept(
    value: Any, *, tensors: bool = True, on_host: bool = False, but: Iterable[Tensor] = ()
) -> Back:
    """Returns a function that gives a value back the contents that it has now, and returns it.

    Dictionaries, lists, deques and what they hold are kept, and tensors if ``tensors`` is true, but
    for those of ``but``; all else is taken for immutable. Copies are made where the tensors are or,
    if there is no room or ``on_host`` is true, in the memory of the host. Putting back allocates no
    memory of a device.
    """
    return _kept(value, tensors, on_host, {id(tensor) for tensor in but})


def _kept(value: Any, *how: Any) -> Back:
    if isinstance(value, Tensor):
        tensors, on_host, but = how
        return _kept_tensor(value, on_host) if tensors and id(value) not in but else lambda: value
    if isinstance(value, dict):
        items = {key: _kept(one, *how) for key, one in value.items()}

        def fill() -> Any:
            found = {key: back() for key, back in items.items()}
            value.clear()
            value.update(found)
            return value

        return fill
    if isinstance(value, (list, tuple, deque)):
        members = [_kept(one, *how) for one in value]

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


def _kept_tensor(tensor: Tensor, on_host: bool) -> Back:
    with torch.no_grad():
        copy = _copy(tensor, on_host)

    def back() -> Tensor:
        with torch.no_grad():
            tensor.copy_(copy)
        return tensor

    return back


def _copy(tensor: Tensor, on_host: bool) -> Tensor:
    if on_host and not tensor.is_cpu:
        return tensor.detach().cpu()
    try:
        return tensor.detach().clone()
    except RuntimeError as error:
        if tensor.is_cpu or not is_out_of_memory(error):
            raise
    return tensor.detach().cpu()
