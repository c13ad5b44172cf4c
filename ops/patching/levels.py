"""The save levels of a model's repeated blocks, set in the one way that measuring, planning and
training share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from .._core.module_copies import private_copy
from ..nn.block import Block
from .families import find_layers
from .patch import patch, patch_call, repeated_layers
from .report import PatchReport


def set_levels(
    model: nn.Module,
    levels: Mapping[str, str],
    *,
    fused_loss: bool = False,
    on_host: Sequence[str] = (),
) -> PatchReport | None:
    """Sets the level of blocks, in place, and returns what was done; None if there was nothing to
    do.

    Layers of the architectures of transformers that are known become Headroom's, whose norms and
    gated units keep less, and so do experts. In any other model only what blocks keep is changed,
    so that training computes the same bits.

    Args:
        levels: by the names of the blocks; empty: blocks stay as they are.
        fused_loss: whether the loss of a language model is computed without its logits.
        on_host: the names of the blocks whose weights lie on the host.
    """
    if not levels and not fused_loss:
        return None
    known = find_layers(model) is not None
    save: dict[str | int, str] = {**levels}
    weights: dict[str | int, str] = dict.fromkeys(on_host, "host")
    return patch(
        model, save or None, norms=known, glu=known, rope=known, loss=fused_loss,
        weights=weights or None,
    )  # fmt: skip


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
        blocks = cls(private_copy(model), fused_loss=fused_loss, has_levels=has_levels)
        blocks.set(blocks.leanest)
        return blocks

    @property
    def leanest(self) -> dict[str, str]:
        """Returns for each block the level that keeps the least."""
        return {name: self.levels(name)[-1] for name in self.names}

    @property
    def now(self) -> dict[str, str] | None:
        """Returns for each block the level that it is at; None where no levels leave the model as
        it is: setting them replaces layers, what was patched before, or another checkpoint, and
        brings back what is held on the host."""
        modules = {name: layer.module for name, layer in self._layers.items()}
        if (
            any(layer.swaps for layer in self._layers.values())
            or patch_call(self.model) is not None
            or any(getattr(module, "gradient_checkpointing", False) for module in modules.values())
        ):
            return None
        found = {
            name: module.save if isinstance(module, Block) else "L0"
            for name, module in modules.items()
        }
        return found if all(found[name] in self.levels(name) for name in found) else None

    def set(self, levels: Mapping[str, str]) -> None:
        """Sets the levels of blocks by their names."""
        set_levels(self.model, levels, fused_loss=self._fused_loss)
