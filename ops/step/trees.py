"""Finds the tensors that nested values and subclasses hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["plain_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in nested dicts, lists, tuples and objects with fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


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
