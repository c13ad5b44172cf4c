"""Settings that need less memory, one after another: what blocks keep, and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..nn import LEVELS, Block
from ..patching.blocks import PatchedLayer
from ..patching.patch import patch, patch_call, repeated_layers

__all__ = ["MicroBatches", "Owner", "SaveLevels"]


class SaveLevels:
    """Raises what all blocks of a model save, a level at a time, as :func:`headroom.patch` sets
    it. The bits of the gradients stay, unless a block computes something else when it runs again:
    then :meth:`give_up`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = getattr(model, "_orig_mod", model)  # of what torch.compile returns
        self._before: list[str] | None = None  # the first was raised
        self._is_given_up = False
        self.is_unverified = False  # no step has run through at the levels that were raised

    def leaner(self) -> str | None:
        """Sets the next level. Returns what was changed, or None if no block can keep less."""
        if self._is_given_up:
            return None
        layers = self._layers()
        now = [self._level(layer) for layer in layers]
        for target in LEVELS:
            wanted = [_raised(layer, level, target) for layer, level in zip(layers, now)]
            if wanted != now:
                self._set(layers, wanted)
                self._before, self.is_unverified = self._before or now, True
                changed = [(a, b) for a, b in zip(now, wanted) if a != b]
                return f"{len(changed)} blocks raised from {_span(changed, 0)} to " + _span(
                    changed, 1
                )
        return None

    def give_up(self) -> str:
        """Sets the levels of the beginning, for good. Returns what was changed."""
        assert self._before is not None
        self._set(self._layers(), self._before)
        self._is_given_up, self.is_unverified = True, False
        return "blocks save what they saved at the beginning, and levels stay as they are"

    def _layers(self) -> list[PatchedLayer]:
        return repeated_layers(self._model)[1]

    def _level(self, layer: PatchedLayer) -> str:
        module = layer.module
        if isinstance(module, Block):
            return module.save
        call = patch_call(self._model)
        if call is not None:
            return call["save"].get(layer.name, "L0")
        return "L5" if getattr(module, "gradient_checkpointing", False) else "L0"

    def _set(self, layers: list[PatchedLayer], levels: list[str]) -> None:
        rest: dict[str | int, str] = {}
        for layer, level in zip(layers, levels):
            if isinstance(layer.module, Block):
                layer.module.save = level
            else:
                rest[layer.name] = level
        if rest:
            # A model that was not patched keeps its own norms, whose bits others do not have.
            call: Mapping[str, Any] = patch_call(self._model) or dict.fromkeys(
                ("norms", "glu", "rope"), False
            )
            patch(self._model, **{**call, "save": rest})


def _raised(layer: PatchedLayer, level: str, target: str) -> str:
    if level >= target:
        return level
    return next((one for one in layer.levels if one >= target), level)


def _span(changed: list[tuple[str, str]], place: int) -> str:
    names = sorted({pair[place] for pair in changed})
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


class MicroBatches:
    """Doubles the number of micro-batches that a step is asked for."""

    def __init__(self, most: int) -> None:
        self._most, self.count = most, 1

    def leaner(self) -> str | None:
        """Sets the next number. Returns what was changed, or None at the largest."""
        if 2 * self.count > self._most:
            return None
        self.count *= 2
        return f"micro-batches: {self.count // 2} before, {self.count} now"


class Owner:
    """Asks an object that has settings of its own for the next one, such as
    :class:`headroom.fitting.Fitted`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def leaner(self) -> str | None:
        """Sets the next setting. Returns what was changed, or None if none is left."""
        before = getattr(self._owner, "choice", None)
        if not self._owner.leaner():
            return None
        now = getattr(self._owner, "choice", None)
        if now is None:
            return f"{type(self._owner).__name__} took a leaner setting"
        return f"{before} became {now}"
