"""What a step with a choice is planned from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.module_copies import copied_modules
from ..planning.checks import check_step
from ..step.description import Step
from .choice import Choice
from .levels import set_levels
from .micro_batches import parts
from .releasing import bucket_of
from .setting import Setting

__all__ = ["setup_of"]


def setup_of(
    setting: Setting,
    choice: Choice,
    names: Sequence[str],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None = None,
) -> Step:
    """Returns the step with a choice, for :func:`headroom.plan`. The model stays as it is: its
    modules are copied, and their tensors shared.

    Args:
        names: of the blocks that ``choice.levels`` are for.
        optimizer: of the choice.
    """
    model = copied_modules(setting.model, lambda x: x)
    set_levels(model, dict(zip(names, choice.levels)), fused_loss=choice.fused_loss)
    return check_step(
        Step(
            model,
            optimizer,
            parts(setting.batch, choice.micro_batches)[0],
            setting.loss,
            setting.forward,
            device=setting.device,
            amp=setting.amp,
            scaler=setting.scaler,
            accumulation=min(2, choice.micro_batches),  # the second is like all that follow
            starts_short=True,  # the first step is there to leave behind what later ones find
            release=choice.release and bucket_of(setting.model, choice),
            max_grad_norm=max_grad_norm,
            dtype=torch.bfloat16 if choice.weights == "bf16" else None,
        )
    )
