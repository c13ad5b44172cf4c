"""Levels of saved activations that need less memory, one after another."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from ..nn import LEVELS, Block
from ..patching.blocks import PatchedLayer
from ..patching.patch import patch, patch_call, repeated_layers


class SaveLevels:
    """Raises what all blocks of a model save, a level at a time, as :func:`headroom.patch` sets
    it. The bits of the gradients stay, unless a block computes something else when it runs again:
    then :meth:`give_up`.

    Attributes:
        is_unverified: whether no step has run through at the levels that were raised.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = getattr(model, "_orig_mod", model)  # of what torch.compile returns
        self._first: dict[str | int, str] = {}  # by block, before the first was raised
        self._is_given_up = self.is_unverified = False

    def leaner(self) -> str | None:
        """Sets the next level. Returns what was changed, or None if no block can keep less."""
        layers = [] if self._is_given_up else repeated_layers(self._model)[1]
        now: dict[str | int, str] = {layer.name: self._level(layer) for layer in layers}
        for target in LEVELS:
            raised: dict[str | int, str] = {
                layer.name: next(level for level in layer.levels if level >= target)
                + now[layer.name][2:]  # on the host, if it is there
                for layer in layers
                if now[layer.name][:2] < target <= layer.levels[-1]
            }
            if raised:
                self._first, self.is_unverified = self._first or now, True
                self._set(now | raised)
                before = _span({now[name] for name in raised})
                return f"{len(raised)} blocks raised from {before} to {_span({*raised.values()})}"
        return None

    def give_up(self) -> str:
        """Sets the levels of the beginning, for good. Returns what was changed."""
        self._set(self._first)
        self._is_given_up, self.is_unverified = True, False
        return "blocks save what they saved at the beginning, and levels stay as they are"

    def _level(self, layer: PatchedLayer) -> str:
        if isinstance(layer.module, Block):
            return layer.module.save
        call = patch_call(self._model)
        if call is not None:
            return call["save"].get(layer.name, "L0")
        return "L5" if getattr(layer.module, "gradient_checkpointing", False) else "L0"

    def _set(self, levels: Mapping[str | int, str]) -> None:
        # A model that was not patched keeps its own norms, whose bits others do not have.
        call = patch_call(self._model) or dict.fromkeys(("norms", "glu", "rope"), False)
        patch(self._model, **{**call, "save": levels})


def _span(levels: Collection[str]) -> str:
    return min(levels) if len(levels) == 1 else f"{min(levels)} to {max(levels)}"
