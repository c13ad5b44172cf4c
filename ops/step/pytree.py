"""Finds and replaces the tensors in nested containers, such as batches and states."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

__all__ = ["leaves_in", "map_tensors", "plain_tensors", "tensors_in"]


def leaves_in(value: Any) -> Iterator[Any]:
    """Yields everything that is no container itself in nested mappings, lists, tuples, sets,
    dataclasses and what torch has registered as a container."""
    for leaf in tree_iter(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # such as the batches of transformers' tokenizers
            yield from leaves_in(list(leaf.values()))
        elif isinstance(leaf, (list, tuple, set, frozenset)):
            yield from leaves_in([*leaf])
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = dataclasses.fields(leaf)
            yield from leaves_in([getattr(leaf, field.name, None) for field in fields])
        else:
            yield leaf


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Returns every tensor in what :func:`leaves_in` looks into."""
    if isinstance(value, Tensor):  # by far the most that is asked
        return iter((value,))
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def map_tensors(
    value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Returns copies of nested mappings, lists, tuples and dataclasses, of their own classes, in
    which each tensor is replaced by what ``change`` returns for it. Everything else is replaced by
    what ``other`` returns, or else shared; so are tuples that know how they move, such as a
    ``PackedSequence``, because some of its tensors stay on the host."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, MutableMapping):  # a loss may read the attributes of a batch
            copied = copy.copy(leaf)
            copied.update({key: map_tensors(item, change, other) for key, item in leaf.items()})
            return copied
        if isinstance(leaf, (list, tuple)) and not _moves_itself(leaf):
            return type(leaf)(map_tensors([*leaf], change, other))
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            copied = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                value = getattr(leaf, field.name, None)
                object.__setattr__(copied, field.name, map_tensors(value, change, other))
            return copied
        return other(leaf)

    return tree_map(replaced, value, is_leaf=_moves_itself)


def _moves_itself(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "to")


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors with memory that a tensor consists of: itself, or what a subclass
    wraps."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or not hasattr(
        tensor, "__tensor_flatten__"
    ):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]  # a DTensor names its mesh among them
    return [plain for part in parts if isinstance(part, Tensor) for plain in plain_tensors(part)]
