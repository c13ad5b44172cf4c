"""Plans by real steps, where fakes cannot go."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch

from .._core.randomness import generators_kept
from ..memory import track
from ..step.description import Step
from ..step.errors import PlanError
from .device import device_share
from .result import Plan
from .steps import Steps

__all__ = ["plan_of_real_steps"]


def plan_of_real_steps(step: Step) -> Plan:
    """Returns the plan of a step from two real steps on copies, under the counter of
    :func:`headroom.memory.track`. Takes the memory that the steps need, and that of the copies.

    Raises:
        PlanError: the model is on the meta device, or the device is not there.
    """
    tensors = (*step.model.parameters(), *step.model.buffers())
    if any(x.is_meta for x in tensors):
        raise PlanError("measure=True runs real steps, but the model is on the meta device")
    if step.sharding is not None:
        raise PlanError("measure=True runs one process: leave world_size and shard out")
    assert step.device is not None
    kind = step.device.type
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError('measure=True with device="cuda" needs a GPU, and there is none')
    with generators_kept(), ExitStack() as stack:
        steps = Steps(step.copied(copy.deepcopy))
        here = next(iter(tensors)).device.type if tensors else kind
        if here != kind:
            raise PlanError(f"measure=True: the model is on {here}, not on {kind}; move it")
        steps.prepare()
        tracked: Any = stack.enter_context(
            track(steps.model, steps.optimizer, batch=steps.given.batch, stacks=False)
        )
        for number in range(step.steps):
            steps.step(number)
        stack.close()
        timeline = tracked.timeline
    timeline.notes.append("Measured: two real steps were run.")
    return Plan(timeline, device_share(timeline), type(step.model).__name__, step.described())
