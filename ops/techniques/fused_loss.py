"""The loss of a language model without its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..patching.losses import has_fused_loss, kept_loss, knows_loss
from ..step.description import Step
from .levels import set_blocks
from .technique import Request, Target, Technique


class FusedLoss(Technique):
    """Computes the loss from hidden states. It is set with the levels of blocks, in one patch."""

    field, default = "fused_loss", False
    told, row = 7, 0

    def values(self, request: Request, choice: Any) -> Sequence[bool]:
        return request.once(self, lambda: self._values(request))

    def _values(self, request: Request) -> Sequence[bool]:
        step = request.step
        if has_fused_loss(step.model):
            return (True,)  # as the user wants it
        if step.loss is None and knows_loss(step.model):
            return (False, True)
        if step.loss is None and True in request.only.get(self.field, (True,)):
            if (own := kept_loss(step.model)) is not None:
                request.note(f"the loss makes logits, because it is the model's own: {own}")
        return (False,)

    def on_copy(self, target: Target, choice: Any) -> None:
        if not choice.levels:
            set_blocks(target, choice.but(weights_host=0))

    def on_measured_copy(self, target: Target, choice: Any) -> None:
        """Leaves the loss as it is: what measures blocks sets it with their levels."""

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        if not choice.levels:
            set_blocks(target, choice)
        return None

    def words(self, choice: Any) -> list[str]:
        return ["fused loss"]

    def change(self, before: Any, after: Any, step: Step) -> tuple[str, str, str]:
        return "fused loss", "logits", "no logits"
