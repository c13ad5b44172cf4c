"""The loss that makes no logits, in Trainers and models of transformers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..loss.language_model import language_model_loss
from ..patching.losses import has_fused_loss

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["fuse_loss", "loss_function", "smoothed_loss"]


def loss_function(
    hidden_states: Tensor,
    lm_head: nn.Module,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Returns the loss that ``model.loss_function`` of a causal language model returns for
    ``lm_head(hidden_states)``, without making these logits.

    It is for models whose ``forward`` one writes, and that :func:`headroom.patch` does not know::

        hidden_states = self.model(input_ids).last_hidden_state
        loss = loss_function(hidden_states, self.lm_head, labels, **kwargs)

    Args:
        hidden_states: ``[batch, tokens, hidden_size]``.
        lm_head: the head. If it is more than a Linear, it is called, and the logits are made.
        labels: int64 ``[batch, tokens]``: the token of each place, or -100. They are shifted here.
        num_items_in_batch: what the sum of losses is divided by, as Trainer passes it: the number
            of labels in all batches of a step; by default the number of those in this one.
        shift_labels: labels that were shifted before, in the place of ``labels``.
        options: ``ignore_index``, ``label_smoothing``, ``softcap`` and the others of
            :func:`headroom.linear_cross_entropy`.
    """
    return language_model_loss(
        hidden_states,
        lm_head,
        labels if shift_labels is None else shift_labels,
        shift=shift_labels is None,
        denominator=num_items_in_batch,
        **options,
    )


def fuse_loss(trainer: Trainer) -> None:
    """Makes a Trainer whose model was patched with ``loss=True`` smooth labels without logits.

    Trainer by itself computes a smoothed loss from logits, of a model that it gives no labels.
    After this call the model gets the labels and computes that loss, in evaluation too.
    Without ``label_smoothing_factor`` a Trainer needs no such call.

    Raises:
        ValueError: the model was not patched so, or the Trainer has a ``compute_loss_func`` or a
            ``compute_loss`` set on it.
    """
    model: Any = trainer.model
    if not has_fused_loss(model):
        raise ValueError(
            f"fuse_loss: the loss of {type(model).__name__} is its own; call "
            "headroom.patch(model, loss=True) before"
        )
    if trainer.compute_loss_func is not None or "compute_loss" in vars(trainer):
        raise ValueError(
            "fuse_loss: the Trainer computes its loss by a function of its own, which gets logits; "
            "remove it, or call headroom.integrations.transformers.loss_function in it"
        )
    own = trainer.compute_loss
    trainer.compute_loss = functools.partial(smoothed_loss, trainer, own)


def smoothed_loss(
    trainer: Any, own: Any, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Returns what ``own``, the Trainer's ``compute_loss``, returns for a model that smooths labels
    by itself."""
    smoother = trainer.label_smoother
    if smoother is None or "labels" not in inputs:
        return own(model, inputs, *args, **kwargs)
    trainer.label_smoother = None
    try:
        return own(model, inputs | {"label_smoothing": smoother.epsilon}, *args, **kwargs)
    finally:
        trainer.label_smoother = smoother
