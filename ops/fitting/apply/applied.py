"""Makes of a model and its optimizer what a choice says, so that it can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ...patching import unpatch
from ...patching.changes import RECORD
from ...techniques import TECHNIQUES
from ...techniques.levels import set_blocks
from ...techniques.technique import Target
from ..choice import Choice


class Applied:
    """A choice that was applied to a model. If something fails, the model is as it was before.

    Args:
        names: of the blocks that ``choice.levels`` are for.
        layers: the names of those whose frozen weights are quantized, if the choice says so.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        optimizer: Any,
        choice: Choice,
        layers: Sequence[str] = (),
    ) -> None:
        target = self._target = Target(model, optimizer, list(names), layers)
        self._choice = choice
        self._undo: list[Callable[[], None]] = []
        try:
            self._remember_patches()
            for technique in TECHNIQUES:
                if technique.is_used(choice):
                    undo = technique.apply(target, choice)
                    self._undo += [] if undo is None else [undo]
        except BaseException:
            self.undo()
            raise

    def set_levels(self, levels: Sequence[str]) -> None:
        """Sets other levels, between two steps."""
        set_blocks(self._target, self._choice.but(levels=tuple(levels)))

    def undo(self) -> None:
        """Gives the model back what it had. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _remember_patches(self) -> None:
        model = self._target.model
        before = [
            (module, record, dict(record.now), dict(record.before))
            for module in model.modules()
            if (record := vars(module).get(RECORD)) is not None
        ]
        self._undo.append(lambda: _patch_again(model, before))


def _patch_again(model: nn.Module, before: Sequence[tuple[nn.Module, Any, dict, dict]]) -> None:
    """Sets on the modules of a model what headroom.patch() had set before, and nothing else."""
    unpatch(model)
    for module, record, now, first in before:
        record.now, record.before = now, first
        for name, value in now.items():
            if isinstance(getattr(type(module), name, None), property):
                setattr(module, name, value)
            else:
                vars(module)[name] = value
        vars(module)[RECORD] = record
