"""The repeated blocks of a model: a copy to measure them on, their levels, set in the one way that
measuring, planning and training share, and which are alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from ..._core.module_copies import copied_modules
from ...nn.block import Block
from ...patching import PatchReport, patch
from ...patching.families import find_layers
from ...patching.patch import patch_call, repeated_layers
from .calls import described

__all__ = ["Blocks", "private_copy", "set_levels"]


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
    made = nn.Parameter(x.detach(), requires_grad=x.requires_grad)
    vars(made).update(vars(x))
    return made


def set_levels(
    model: nn.Module, levels: Mapping[str, str], *, fused_loss: bool = False
) -> PatchReport | None:
    """Sets the level of blocks, in place, and returns what was done; None if there was nothing to
    do.

    Layers of the architectures of transformers that are known become Headroom's, whose norms and
    gated units keep less. In any other model only what blocks keep is changed, so that training
    computes the same bits.

    Args:
        levels: by the names of the blocks; empty: blocks stay as they are.
        fused_loss: whether the loss of a language model is computed without its logits.
    """
    if not levels and not fused_loss:
        return None
    known = find_layers(model) is not None
    save: dict[str | int, str] = {**levels}
    return patch(model, save or None, norms=known, glu=known, rope=known, loss=fused_loss)


class Blocks:
    """The blocks of a model whose levels can be set.

    Args:
        model: that they are in.
        fused_loss: is set with the levels, as by :func:`set_levels`.
        has_levels: if not, there are no such blocks.

    Attributes:
        model: that they are in.
        names: of the blocks, as in ``named_modules()``.
    """

    def __init__(
        self, model: nn.Module, *, fused_loss: bool = False, has_levels: bool = True
    ) -> None:
        self.model, self._fused_loss = model, fused_loss
        layers = repeated_layers(model)[1] if has_levels else []
        self.names = [layer.name for layer in layers]
        self._layers = {layer.name: layer for layer in layers}
        self._options = {layer.name: _options(layer.module) for layer in layers}
        self._numbers = _numbering(self._options)

    def module(self, name: str) -> nn.Module:
        return self._layers[name].module

    def levels(self, name: str) -> tuple[str, ...]:
        """Returns the levels that a block can be at, from the one that keeps the most on."""
        return tuple(self._layers[name].levels)

    @classmethod
    def of_copy(
        cls, model: nn.Module, *, fused_loss: bool = False, has_levels: bool = True
    ) -> Blocks:
        """Returns the blocks of a private copy of a model, all at their leanest."""
        made = cls(private_copy(model), fused_loss=fused_loss, has_levels=has_levels)
        made.set(made.leanest)
        return made

    @property
    def leanest(self) -> dict[str, str]:
        """Returns for each block the level that keeps the least."""
        return {name: self.levels(name)[-1] for name in self.names}

    @property
    def now(self) -> dict[str, str] | None:
        """Returns for each block the level that it is at; None where no levels leave the model as it
        is: setting them replaces layers, what was patched before, or another checkpoint."""
        modules = {name: layer.module for name, layer in self._layers.items()}
        if (
            find_layers(self.model) is not None
            or patch_call(self.model) is not None
            or any(getattr(module, "gradient_checkpointing", False) for module in modules.values())
        ):
            return None
        return {
            name: module.save if isinstance(module, Block) else "L0"
            for name, module in modules.items()
        }

    def set(self, levels: Mapping[str, str]) -> None:
        """Sets the levels of blocks by their names."""
        set_levels(self.model, levels, fused_loss=self._fused_loss)

    def kind(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Returns what blocks of equal costs have in common, given the arguments of a call:
        classes, plain options, shapes and dtypes of weights and arguments, and what requires
        gradients. Options that number the blocks are no difference."""
        block = self.module(name)
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
            for part, module in block.named_modules()
        )
        return modules, options, self.levels(name), described((args, kwargs))


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
