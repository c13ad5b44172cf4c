"""Says whose memory loaded tensors have, and copies those that somebody else may still hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .dtensor import local_part

# The memory that has been kept within the innermost given_up(), or None outside of one.
_kept: ContextVar[set[int] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def given_up() -> Iterator[None]:
    """Lets objects keep the tensors that they load within: nobody else holds what was read from a
    file, say."""
    token = _kept.set(set())
    try:
        yield
    finally:
        _kept.reset(token)


class Ownership:
    """Tells tensors that have memory of their own from those that share it, which are copied.

    Args:
        given: values that somebody else may hold, such as a state dict.
        own: values whose memory may be kept, by one tensor each.
    """

    def __init__(self, given: Any, own: Any = ()) -> None:
        self._given = _storages(given)
        kept = _kept.get()
        self._free = _storages(own) if kept is None else self._given - kept
        self._kept = set() if kept is None else kept

    def owned(self, value: Any) -> Any:
        """Returns a value whose tensors nobody else holds: the same tensors, or copies."""
        if isinstance(value, Tensor):
            return self._owned_tensor(value)
        return tree_map_only(Tensor, self._owned_tensor, value)

    @torch.no_grad()
    def _owned_tensor(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._given and storage is not None:
            return tensor
        if storage in self._free:
            self._free.discard(storage)
            self._kept.add(storage)
            return tensor
        return tensor.detach().clone()


def _storages(values: Iterable[Any]) -> set[int]:
    found = (_storage(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {storage for storage in found if storage is not None}


def _storage(tensor: Tensor) -> int | None:
    """Returns a number that tensors with the same memory have in common, or None if a tensor, such
    as a sparse one, has no memory of its own."""
    try:
        return local_part(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
