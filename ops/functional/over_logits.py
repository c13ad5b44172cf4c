"""What losses of given logits share."""

from __future__ import annotations

from torch import Tensor

__all__ = ["refuse_leaf"]


def refuse_leaf(logits: Tensor, name: str) -> None:
    """Raises where a gradient over the logits, an argument of this name, would change a leaf."""
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        raise ValueError(
            f"inplace_backward=True would write the gradient over {name}, which is a leaf that "
            "requires grad, or a view of one; leave it out"
        )
