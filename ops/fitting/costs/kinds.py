"""Finds the blocks of a model that are alike, so that one of them is measured for all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from ...patching.levels import Blocks
from ...step.calls import described


class Likeness:
    """Tells which of the blocks of a model have equal costs."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._options = {name: _options(blocks.module(name)) for name in blocks.names}
        self._numbers = _numbering(self._options)

    def of(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Returns what blocks of equal costs have in common, given the arguments of a call:
        classes, plain options, shapes and dtypes of weights and arguments, and what requires
        gradients. Options that number the blocks are no difference."""
        options = frozenset(
            option for option in self._options[name].items() if option[0] not in self._numbers
        )
        modules = tuple(
            (
                part,
                type(module).__qualname__,
                module.training,
                described(module._parameters),
                described(module._buffers),
            )
            for part, module in self._blocks.module(name).named_modules()
        )
        return modules, options, self._blocks.levels(name), described((args, kwargs))


def _options(block: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Returns the plain attributes of a block and of the modules in it."""
    return {
        (part, key): described(value)
        for part, module in block.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (int, float, str, type(None)))


def _numbering(options: Mapping[str, Mapping[tuple[str, str], Hashable]]) -> set[tuple[str, str]]:
    """Returns which options are the number of the block in every block that has them."""
    is_number: dict[tuple[str, str], bool] = {}
    for name, found in options.items():
        number = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)
        for key, value in found.items():
            is_number[key] = is_number.get(key, True) and type(value) is int and value == number
    return {key for key, holds in is_number.items() if holds}
