"""Keeps what a block is called with, so that the block can be called again by itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._core.surroundings import Settings
from .pytree import leaves_in, map_tensors

__all__ = ["Call", "described", "results_of", "tensors_of"]

_SHARED = (nn.Module, torch.dtype, torch.device, type)  # nothing in these belongs to one call


class Call:
    """The arguments of one call, without the graph behind them.

    Attributes:
        settings: autocast and the choice of kernels, as they were around the call.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> None:
        self.settings = Settings([device.type])
        self._needs_grad: set[int] = set()
        self._given = _mapped((args, dict(kwargs)), self._kept)

    def _kept(self, x: Tensor) -> Tensor:
        kept = x.detach()
        if x.requires_grad:
            self._needs_grad.add(id(kept))
        return kept

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments for another call. Those that require gradients are no leaves, as
        in a model, so that a block may change them in place; objects that a call may change, such
        as caches, are copies."""

        def renewed(x: Tensor) -> Tensor:
            return x.detach().requires_grad_().clone() if id(x) in self._needs_grad else x

        return _mapped(self._given, renewed)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of nested containers and objects with other tensors in it."""

    def copied(leaf: Any) -> Any:
        if not hasattr(leaf, "__dict__") or callable(leaf) or isinstance(leaf, _SHARED):
            return leaf
        memo: dict[int, Any] = {id(x): change(x) for x in tensors_of(leaf)}
        try:
            return copy.deepcopy(leaf, memo)
        except Exception:  # what cannot be copied is shared, as it is between the blocks of a model
            return leaf

    return map_tensors(value, change, copied)


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yields the tensors in nested containers and objects, modules left out."""
    seen = set() if seen is None else seen
    for leaf in leaves_in(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif id(leaf) not in seen and not isinstance(leaf, _SHARED):
            seen.add(id(leaf))
            yield from tensors_of(getattr(leaf, "__dict__", ()), seen)


def described(value: Any) -> Hashable:
    """Returns what distinguishes values that lead to different costs: shapes, strides, dtypes,
    whether gradients are needed, and plain values; of other objects their class."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)
    if isinstance(value, (int, float, str, type(None), torch.dtype, torch.device)):
        return value
    if isinstance(value, Mapping):
        return tuple((str(key), described(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(described(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return tuple(described(getattr(value, name)) for name in names)
    return type(value).__qualname__


def results_of(value: Any) -> list[Tensor]:
    """Returns the tensors in the result of a block that a backward pass may begin at."""
    return [x for x in tensors_of(value) if x.requires_grad]
