"""The loss of a language model, from its hidden states and the module of its head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.surroundings import is_plain, takes_ops
from ..functional.cross_entropy import cross_entropy
from ..functional.linear import linear_forward
from ..functional.linear_quantized import quantized_linear_forward, weight_and_bias
from .linear_cross_entropy import linear_cross_entropy


def is_plain_head(head: nn.Module) -> bool:
    """Returns whether a head does nothing but multiply by its weight and add its bias: an
    ``nn.Linear``, of few bits too, without hooks, adapters or a ``forward`` that does something
    else. Hooks of FSDP2, whose weights are DTensors outside of them, do not count; but few bits
    that it has sharded are read by the head alone."""
    if not isinstance(head, nn.Linear):
        return False
    own = vars(head).get("forward", type(head).forward)
    own = getattr(own, "func", own)
    if own not in (nn.Linear.forward, linear_forward, quantized_linear_forward):
        return False
    hooks = (
        *(head._forward_hooks, head._forward_pre_hooks),
        *(head._backward_hooks, head._backward_pre_hooks),
    )
    if not is_plain(head.weight):
        return own is not quantized_linear_forward
    return not any(hooks)


def takes_head(head: nn.Linear) -> bool:
    """Returns whether the loss takes the weight of a plain head here."""
    weight = head.weight
    if not is_plain(weight):
        return True
    if isinstance(weight_and_bias(head)[0], Tensor):
        return takes_ops(weight, (2,))
    return takes_ops(weight.new_empty((0, 0), dtype=torch.float32))  # which few bits decode to


def language_model_loss(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    shift: bool = True,
    ignore_index: int = -100,
    denominator: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    **options: Any,
) -> Tensor:
    """Returns the mean cross entropy of the tokens that count, float32, without their logits.

    Where the head is more than a Linear (adapters, hooks, weights that another library has
    quantized), its logits are computed by calling it, and the loss from them.

    Args:
        hidden: ``[..., tokens, hidden_size]``, what the head is given.
        head: an ``nn.Linear``, whose weight may be that of the embeddings, one of 4 or 8 bits, or
            another module that returns ``[..., tokens, classes]``.
        labels: int64 ``[..., tokens]``: the tokens themselves, with ``ignore_index`` in the places
            that count for nothing.
        shift: whether a token is to predict the one after it: the first label of each sequence is
            then nobody's, and the last token predicts nothing. Without it each predicts the label
            of its own place.
        denominator: what the sum of losses is divided by, such as the number of labels in all
            batches that are accumulated; by default the number of labels that count in this one,
            and the loss is zero if none does.
        ignore_index, label_smoothing, softcap, z_loss, options: as in
            :func:`headroom.linear_cross_entropy`.

    Raises:
        ValueError: an option other than those named above is given, but the head is no Linear.
    """
    labels = labels.to(hidden.device)
    if isinstance(denominator, Tensor):
        denominator = denominator.to(hidden.device)
    named: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "z_loss": z_loss,
    }
    if is_plain_head(head):
        if denominator is not None:
            named |= {"reduction": "sum", "denominator": denominator}
        named |= {"shift": shift}
        weight, bias = weight_and_bias(head, hidden.dtype)
        return linear_cross_entropy(hidden, weight, labels, bias, **named, **options)  # type: ignore[return-value]
    if options:
        raise ValueError(
            f"language_model_loss: {', '.join(options)} cannot be given, because the head is a "
            f"{type(head).__name__} with hooks or adapters, wanted a plain Linear for that"
        )
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    named |= {"empty": "zero"} if denominator is None else {"reduction": "sum"}
    loss = cross_entropy(head(hidden), labels, **named)
    return loss if denominator is None else loss / denominator  # type: ignore[return-value]
