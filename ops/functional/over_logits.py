"""What losses of given logits share: a gradient that may be written over the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.registration import require

__all__ = ["check_float32", "logits_gradient", "refuse_leaf"]


def refuse_leaf(logits: Tensor, name: str) -> None:
    """Raises where a gradient over the logits, an argument of this name, would change a leaf."""
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        raise ValueError(
            f"inplace_backward=True would write the gradient over {name}, which is a leaf that "
            "requires grad, or a view of one; leave it out"
        )


def check_float32(**given: Tensor) -> None:
    """Raises in a fake what a backward op would raise of the tensors that a forward op left."""
    for name, tensor in given.items():
        require(tensor.dtype == torch.float32, f"{name} has dtype {tensor.dtype}, wanted float32")


def logits_gradient(
    ctx: Any, dloss: Tensor | None, name: str, *numbers: Any, takes_grad: bool
) -> Tensor | None:
    """Returns the gradient of the logits, which are the first tensor that ``ctx`` saved, by
    ``headroom::{name}_backward``, or where ``ctx.in_place`` by ``headroom::{name}_backward_``.

    The op takes ``dloss``, what was saved, and ``numbers``; ``takes_grad`` says that the second
    also takes where to write, which is then over the logits.
    """
    if ctx.is_spent:
        raise RuntimeError(
            f"a second backward of {name} with inplace_backward=True: the first wrote the "
            "gradient over the logits; use inplace_backward=False"
        )
    if dloss is None or not ctx.needs_input_grad[0]:
        return None
    if ctx.in_place and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} with inplace_backward=True writes the gradient over the logits, which "
            "create_graph=True and torch.func may still need; use inplace_backward=False"
        )
    saved = ctx.saved_tensors
    if not ctx.in_place:
        return getattr(torch.ops.headroom, f"{name}_backward")(dloss, *saved, *numbers)
    ctx.is_spent = True
    logits = saved[0]
    into = (logits,) if takes_grad else ()
    getattr(torch.ops.headroom, f"{name}_backward_")(dloss, *saved, *numbers, *into)
    return logits.detach()
