"""The save levels of a model's blocks, set in the one way that measuring, planning and training
share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..patching import PatchReport, patch
from ..patching.families import find_layers

__all__ = ["set_levels"]


def set_levels(
    model: nn.Module, levels: Mapping[str, str], *, fused_loss: bool = False
) -> PatchReport | None:
    """Sets the level of blocks, in place, and returns what was done; None if there was nothing to
    do.

    Layers of the architectures of transformers that are known become Headroom's, whose norms and
    gated units keep less. In any other model only what blocks keep is changed, so that training
    computes the same bits.

    Args:
        levels: by the names of the blocks; empty: blocks stay as they are.
        fused_loss: whether the loss of a language model is computed without its logits.
    """
    if not levels and not fused_loss:
        return None
    known = find_layers(model) is not None
    save: dict[str | int, str] = {**levels}
    return patch(model, save or None, norms=known, glu=known, rope=known, loss=fused_loss)
