"""Groups tensors that one call of an op can take: those of one device, for instance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Returns the items of each key. Keys and items keep the order in which they come, which is the
    same on all ranks if the items are."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Returns the tensors of each device."""
    return grouped(tensors, lambda tensor: tensor.device)
