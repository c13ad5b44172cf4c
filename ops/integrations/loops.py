"""``headroom.fit`` for loops of other libraries, which hold more than a loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._core.sizes import format_bytes, parse_bytes
from ..fitting import Fitted
from ..fitting.api import fit_step
from ..fitting.ranks import together, world_size
from ..step.description import Step
from ..step.errors import PlanError
from ..step.micro_batches import bytes_of, samples_of
from ..step.rules import rule_of
from .values import line_of

__all__ = [
    "WHOLE_BATCHES",
    "batches_planned",
    "extra_bytes",
    "fit_in_loop",
    "mixed_precision",
    "rule_of_parts",
]

SCALARS = 4096  # losses, counts and norms that a loop keeps between its steps
WHOLE_BATCHES = "micro-batches: the losses of smaller batches do not add up to those of the loop's"


def extra_bytes(model: nn.Module, *held: Any) -> int:
    """Returns the bytes that a loop holds besides what is planned: on several ranks the buckets of
    DistributedDataParallel, and batches besides the part of one that is trained.

    Args:
        held: these batches.
    """
    extra = SCALARS + bytes_of(held)
    if world_size() > 1:
        extra += bytes_of([p for p in model.parameters() if p.requires_grad])
    return extra


def batches_planned(steps: int) -> int:
    """Returns how many of the ``steps`` batches that a loop accumulates are planned: from the
    second on gradients are there already, and all are alike."""
    return min(steps, 2)


def rule_of_parts(step: Step, rules: Sequence[str], steps: int) -> str | None:
    """Returns the rule by which losses of smaller batches add up to those that a loop computes, or
    None if there is none, such as for a loss that is a sum where the loop wants means.

    Args:
        step: with the batches that the loop accumulates as one.
        rules: of :mod:`headroom.step.micro_batches`.
        steps: how many batches these are.
    """
    samples = (samples_of(step.batch) or steps) // steps
    return rules[0] if samples < 2 else rule_of(step, rules)


def fit_in_loop(
    step: Step,
    *,
    budget: int | str | None,
    extra: int,
    who: str,
    only: Mapping[str, Any],
    **options: Any,
) -> Fitted:
    """Fits a step that someone else's loop makes into a budget, and returns what was done. The
    loop weighs the losses of parts of a batch itself, so that they are not compared again.

    Args:
        step: as it is described; of the batches that are planned.
        options: of :func:`headroom.fit`.
        budget: bytes, of which ``extra`` are left for the loop; None: the device's memory.
        who: the caller, for errors.
        only: the values that fields of a choice may have in this loop.

    Raises:
        ValueError: the budget is not even enough for ``extra``.
        headroom.fitting.DoesNotFit: it is not enough for any choice.
    """
    with together():
        if budget is None:
            options["target"] = "speed"
        else:
            size = parse_bytes(budget, "budget")
            if size <= extra:
                raise ValueError(
                    f"{who}: budget is {format_bytes(size)}, and the loop itself holds "
                    f"{format_bytes(extra)}; give a larger one"
                )
            options["budget"] = size - extra
    try:
        return fit_step(step, only=only, parts_add_up=True, **options)
    except PlanError as error:
        line = line_of(error.__cause__)
        if line is None:
            raise
        raise PlanError(
            f"{who}: {error}. This is at {line}. Without {who}, headroom.patch(model, 'L5') and "
            "smaller batches save memory where nothing can be planned"
        ) from error


def mixed_precision(accelerator: Any, *, who: str) -> dict[str, Any]:
    """Returns ``amp`` and ``scaler`` of a step for an accelerator."""
    known = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    name = accelerator.mixed_precision
    if name not in known:
        raise ValueError(
            f"{who}: mixed precision is {name!r}, which cannot be planned; wanted one of "
            f"{', '.join(known)}"
        )
    return {"amp": known[name], "scaler": accelerator.scaler}
