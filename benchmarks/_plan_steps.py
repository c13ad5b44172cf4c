"""The training steps that the planner's benchmark predicts and measures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ._plan_cases import Case

STEPS = 2


def made(
    case: Case, device: torch.device, changed: Callable[[Any], Any] = lambda model: model
) -> tuple[Any, Any, Any]:
    """Returns the model, which may be changed before its optimizer is made, that and a batch."""
    torch.manual_seed(0)
    model = changed(case.model().to(device))
    batch = tuple(x.to(device) for x in case.batch())
    return model, case.optimizer(model), batch


def run_steps(
    case: Case, model: Any, optimizer: Any, batch: Any, device: torch.device, steps: int = STEPS
) -> None:
    """Trains, as a user's loop does."""
    for _ in range(steps):
        for _ in range(case.accumulation):
            with contextlib.ExitStack() as stack:
                if case.amp is not None:
                    stack.enter_context(torch.autocast(device.type, dtype=case.amp))
                loss = case.loss(model, batch)
            if case.accumulation > 1:
                loss = loss / case.accumulation
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
