"""The loss of a language model without its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..patching.losses import has_fused_loss, kept_loss, knows_loss
from .technique import Request, Technique


class FusedLoss(Technique):
    """Computes the loss from hidden states. What sets the levels of blocks sets it."""

    field, default = "fused_loss", False
    told, row = 7, 0
    in_words, in_row = "fused loss", ("fused loss", "logits", "no logits")

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
