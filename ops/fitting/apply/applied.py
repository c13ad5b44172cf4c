"""Makes of a model and its optimizer what a choice says, so that it can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...amp.cast_model import cast_model
from ...optim import load_master_weights, master_weights, offload
from ...patching import unpatch
from ...patching.changes import RECORD
from ...patching.levels import set_levels
from ...quantizing.frozen import FrozenWeights
from ...release import bucket_of, release_gradients
from ..choice import Choice


class Applied:
    """A choice that was applied to a model. If something fails, the model is as it was before.

    Attributes:
        handle: of the release of gradients, or None.

    Args:
        names: of the blocks that ``choice.levels`` are for.
        layers: the names of those whose frozen weights are put into few bits, if the choice says
            so. These come back with the numbers of their codes: nobody keeps those that they had.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        optimizer: Any,
        choice: Choice,
        layers: Sequence[str] = (),
    ) -> None:
        self.model, self.names, self.optimizer = model, list(names), optimizer
        self._fused_loss, self._weights_host = choice.fused_loss, choice.weights_host
        self.handle: Any = None
        self._undo: list[Callable[[], None]] = []
        self._others: dict[Tensor, torch.dtype] = {}  # of tensors that were cast from other dtypes
        try:
            self._remember_patches()
            if choice.frozen != "given":
                frozen = FrozenWeights(model, layers)
                self._undo.append(frozen.give_back)
                frozen.quantize(choice.frozen)
            if choice.weights == "bf16":
                self._cast()
            self.set_levels(choice.levels)
            if choice.offload:
                budget = choice.state_budget or None
                handle = offload(optimizer, choice.offload, budget=budget)
                self._undo.append(handle.remove)
            if choice.weights_host:  # which come back before their states do
                self._undo.append(lambda: unpatch(model))
            if choice.release:
                bucket = bucket_of(model, choice.dtype)
                self.handle = release_gradients(model, optimizer, bucket_bytes=bucket)
                self._undo.append(self._end_release)
        except BaseException:
            self.undo()
            raise

    def set_levels(self, levels: Sequence[str]) -> None:
        """Sets other levels, between two steps."""
        set_levels(
            self.model,
            dict(zip(self.names, levels)),
            fused_loss=self._fused_loss,
            on_host=self.names[: self._weights_host],
        )

    def undo(self) -> None:
        """Gives the model back what it had. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _remember_patches(self) -> None:
        before = [
            (module, record, dict(record.now), dict(record.before))
            for module in self.model.modules()
            if (record := vars(module).get(RECORD)) is not None
        ]
        self._undo.append(lambda: _patch_again(self.model, before))

    def _cast(self) -> None:
        """Makes the parameters bfloat16, and gives the optimizer the bits that they lose."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        tensors = {*self.model.parameters(), *self.model.buffers()}
        before = {x: x.data for x in tensors if x.is_floating_point()}
        self._others = {x: x.dtype for x in before if x.dtype != torch.float32}
        try:
            cast_model(self.model, torch.bfloat16)
            load_master_weights(self.optimizer, {p: before[p] for p in params})
        except BaseException:
            cast_model(self.model, torch.float32)
            for x, data in before.items():
                x.data = data
            raise
        self._undo.append(self._cast_back)

    def _cast_back(self) -> None:
        weights = master_weights(self.optimizer)
        cast_model(self.model, torch.float32)
        for param, value in weights.items():
            param.data = value
        for x, dtype in self._others.items():
            grad, x.grad = x.grad, None  # which has to be of the same dtype
            x.data = x.data.to(dtype)
            x.grad = None if grad is None else grad.to(dtype)

    def _end_release(self) -> None:
        self.handle.remove()
        self.handle = None


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
