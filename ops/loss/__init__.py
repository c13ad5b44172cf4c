"""Losses that are fused with the product before them, so that logits never exist as a whole."""

from .distillation import linear_distillation_loss

__all__ = ["linear_distillation_loss"]
