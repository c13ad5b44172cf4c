"""A plan from real steps, where fakes cannot go."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch

from ..memory import track
from ..step.errors import PlanError
from ..step.randomness import generators_kept
from .device import device_share
from .result import Plan
from .steps import Setup, Steps

__all__ = ["measured"]


def measured(setup: Setup) -> Plan:
    """Returns the plan of a setup from two real steps on copies, under the counter of
    :func:`headroom.memory.track`. Takes the memory that the steps need, and that of the copies.

    Raises:
        PlanError: the model is on the meta device, or the device is not there.
    """
    tensors = (*setup.model.parameters(), *setup.model.buffers())
    if any(x.is_meta for x in tensors):
        raise PlanError("measure=True runs real steps, but the model is on the meta device")
    if setup.sharding is not None:
        raise PlanError("measure=True runs one process: leave world_size and shard out")
    if setup.device == "cuda" and not torch.cuda.is_available():
        raise PlanError('measure=True with device="cuda" needs a GPU, and there is none')
    given = (setup.model, setup.optimizer, setup.batch, setup.loss, setup.forward)
    with generators_kept(), ExitStack() as stack:
        copies = copy.deepcopy(given)
        here = next(iter(tensors)).device.type if tensors else setup.device
        if here != setup.device:
            raise PlanError(f"measure=True: the model is on {here}, not on {setup.device}; move it")
        steps = Steps(setup, *copies)
        steps.prepare()
        tracked: Any = stack.enter_context(
            track(steps.model, steps.optimizer, batch=steps.batch, stacks=False)
        )
        for number in range(setup.steps):
            steps.step(number)
        stack.close()
        timeline = tracked.timeline
    timeline.notes.append("Measured: two real steps were run.")
    return Plan(timeline, device_share(timeline), type(setup.model).__name__, setup.described())
