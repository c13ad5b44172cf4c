"""What would have made a step smaller that ran out of memory, with code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..._core import upward
from ..._core.sizes import format_bytes
from ...step.trees import mapped, tensors_in

__all__ = ["Planned", "shapes_of", "ways_out"]

_COUNT = 3
_PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


def shapes_of(value: Any) -> Any:
    """Returns nested values with tensors on the meta device in the place of theirs; None if there
    is anything else in them, whose memory would be kept."""
    if not all(isinstance(leaf, _PLAIN) for leaf in tree_iter(value)):
        return None
    return mapped(value, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))


class Planned(NamedTuple):
    """What a step can be planned from: ``batch`` is :func:`shapes_of` of the arguments and named
    arguments that the model was called with."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Any


def ways_out(planned: Planned | None, asked: int) -> list[str]:
    """Returns lines that name the three cheapest changes, with their code. Those come first that
    save at least what was asked for."""
    if planned is None:
        why = "advice was turned off, or the model was called with more than tensors, or never"
    else:
        try:
            return _from_plan(planned, asked)
        except Exception as error:  # the error that is being explained matters more
            why = f"{error or type(error).__name__}".splitlines()[0]
    return [
        f"No changes could be planned: {why}.",
        "headroom.fit(model, batch, budget=...) chooses what to keep, by steps that it measures.",
    ]


def _from_plan(planned: Planned, asked: int) -> list[str]:
    if len(planned.optimizers) > 1:
        raise ValueError("there are several optimizers")
    device = next(planned.model.parameters()).device.type
    optimizer = planned.optimizers[0] if planned.optimizers else None
    now = upward.plan(planned.model, optimizer, planned.batch, forward=_forward, device=device)
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
    """Returns the percentage of "about 7 % slower"; 0 for what is no slower."""
    found = re.search(r"([\d.]+) % slower", time)
    return float(found[1]) if found else 0.0
