"""What would have made a step smaller that ran out of memory, with code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._core import upward
from ..._core.sizes import format_bytes
from ...step.trees import tensors_in

__all__ = ["Planned", "shapes_of", "ways_out"]

_COUNT = 3
_BY_KIND = {  # a change that makes the kind smaller, and its code
    "activations": ("keep fewer activations", "headroom.checkpoint_every(model, 1)"),
    "optimizer_state": (
        "keep moments in 8 bits",
        "optimizer = headroom.optim.AdamW8bit(model.parameters())",
    ),
    "master_weights": (
        "keep 16-bit remainders of weights",
        'optimizer = headroom.optim.AdamW(model.parameters(), master="remainder16")',
    ),
    "gradients": (
        "release gradients in the backward pass",
        "handle = headroom.release_gradients(model, optimizer)  # an optimizer of headroom.optim",
    ),
    "parameters": (
        "keep weights in bfloat16 with a 16-bit remainder",
        "headroom.cast_model(model, torch.bfloat16)\n"
        'optimizer = headroom.optim.AdamW(model.parameters(), master="remainder16")',
    ),
    "temporaries": (
        "take the batch in two halves",
        "for part in halves(batch):  # then one optimizer.step()\n"
        "    (loss_of(model, part) / 2).backward()",
    ),
}


class _Shape(NamedTuple):
    """A tensor without its memory."""

    shape: torch.Size
    dtype: torch.dtype


class _Unknown:
    """Anything else, which is not kept."""


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def shapes_of(value: Any) -> Any:
    """Returns nested values with the shapes of tensors in their place, so that nothing of them is
    kept."""
    if isinstance(value, Tensor):
        return _Shape(value.shape, value.dtype)
    if isinstance(value, dict):
        return {key: shapes_of(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(shapes_of, value))
    return value if isinstance(value, _PLAIN) else _Unknown()


def _like(value: Any) -> Any:
    """Returns tensors on the meta device in the place of shapes."""
    if isinstance(value, _Shape):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _like(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_like, value))
    if isinstance(value, _Unknown):
        raise TypeError("the model was called with objects that are no tensors")
    return value


class Planned(NamedTuple):
    """What a step can be planned from: ``batch`` is :func:`shapes_of` of the arguments and named
    arguments that the model was called with."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Any


def ways_out(planned: Planned | None, kinds: Mapping[str, int], asked: int) -> list[str]:
    """Returns lines that name the three cheapest changes, with their code. Of changes that can be
    planned those come first that save at least what was asked for."""
    if planned is None:
        why = "the model was not called, or advice was turned off"
    else:
        try:
            return _from_plan(planned, asked)
        except Exception as error:  # the error that is being explained matters more
            why = f"{error or type(error).__name__}".splitlines()[0]
    return [f"No changes could be planned: {why}. From the kinds:", *_from_kinds(kinds)]


def _from_plan(planned: Planned, asked: int) -> list[str]:
    if len(planned.optimizers) > 1:
        raise ValueError("there are several optimizers")
    device = next(planned.model.parameters()).device.type
    optimizer = planned.optimizers[0] if planned.optimizers else None
    now = upward.plan(
        planned.model, optimizer, _like(planned.batch), forward=_forward, device=device
    )
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


def _from_kinds(kinds: Mapping[str, int]) -> list[str]:
    lines = []
    largest = sorted((k for k in _BY_KIND if kinds.get(k)), key=lambda kind: -kinds[kind])
    for number, kind in enumerate(largest[:_COUNT], start=1):
        name, code = _BY_KIND[kind]
        lines.append(f"{number}. {name}: {format_bytes(kinds[kind])} are {kind.replace('_', ' ')}")
        lines += [f"       {line}" for line in code.splitlines()]
    return lines or ["nothing that is known would make them smaller"]
