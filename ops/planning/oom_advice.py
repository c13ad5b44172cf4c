"""Says what would have made a step smaller that ran out of memory, with code."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._core.sizes import format_bytes
from ..step.pytree import tensors_in
from .api import plan
from .fine_tuning import CHANGES_TRAINING

__all__ = ["oom_advice"]

_COUNT = 3


def oom_advice(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any, asked: int
) -> list[str]:
    """Returns lines that name the three cheapest changes, with their code. Those come first that
    save at least what was asked for.

    Args:
        batch: arguments and named arguments that the model was called with, on the meta device.
        asked: the bytes of the request that failed.

    Raises:
        ValueError: there are several optimizers, or what the model returns has no gradient.
        PlanError: the step cannot be planned.
    """
    if len(optimizers) > 1:
        raise ValueError("there are several optimizers")
    device = next(model.parameters()).device.type
    now = plan(model, *optimizers or (None,), batch, forward=_forward, device=device)
    advice = sorted(now.advice(), key=lambda each: (each.bytes < asked, _cost(each.time)))
    if not advice:
        return ["Of the changes that were planned, none would make the step smaller."]
    lines = ["The cheapest ways out, each planned by itself for a step of this shape:"]
    for number, each in enumerate(advice[:_COUNT], start=1):
        lines.append(f"{number}. {each.name}: {format_bytes(each.bytes)} less, {each.time}")
        lines += [f"       {line}" for line in each.code.splitlines()]
    return lines


def _forward(model: nn.Module, batch: Any) -> Tensor:
    """Returns a sum of what the model returns, in place of a loss that is not known."""
    arguments, named = batch
    parts = [t.float().sum() for t in tensors_in(model(*arguments, **named)) if t.requires_grad]
    if not parts:
        raise ValueError("what the model returns requires no gradient")
    return torch.stack(parts).sum()


def _cost(time: str) -> float:
    """Returns the percentage of "about 7 % slower"; 0 for what is no slower. What changes the
    training comes last."""
    if time.startswith(CHANGES_TRAINING):
        return math.inf
    found = re.search(r"([\d.]+) % slower", time)
    return float(found[1]) if found else 0.0
