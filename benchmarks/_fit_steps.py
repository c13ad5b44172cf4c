"""Training steps as a user writes them: plain, and with torch's checkpoint on every n-th block."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ._fit_cases import Training

STEPS = 3  # whose peak is measured
EVERY = (None, 8, 4, 3, 2, 1)  # blocks of which one is checkpointed; None: no checkpoint

# The strongest that a user of torch has: it takes no memory besides its state.
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def made(training: Training) -> tuple[nn.Module, Any]:
    """Returns the model and a batch, the same each time."""
    torch.manual_seed(0)
    return training.model().train(), training.batch()


def loss_of(training: Training, model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return model(**batch).loss
    if training.loss is None:
        return model(*batch)
    *inputs, target = batch
    return training.loss(model(*inputs), target)


class TorchSteps:
    """Steps with torch's optimizer, and torch's checkpoint on every n-th block; None: on none."""

    def __init__(self, training: Training, every: int | None = None) -> None:
        self.training = training
        self.model, self.batch = made(training)
        self.optimizer = OPTIMIZER(self.model.parameters())
        blocks = self.model.get_submodule(training.blocks)
        for number, block in enumerate(blocks.children()):
            if every is not None and number % every == 0:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def step(self) -> None:
        loss_of(self.training, self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class FitSteps:
    """Steps of what ``headroom.fit`` found for a budget."""

    def __init__(self, training: Training, budget: int, host_budget: int | None = None) -> None:
        import headroom

        self.model, self.batch = made(training)
        wall, cpu = time.perf_counter(), time.process_time()
        self.fitted = headroom.fit(
            self.model,
            self.batch,
            budget=budget,
            host_budget=host_budget,
            optimizer=OPTIMIZER,
            loss=training.loss,
        )
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.optimizer = self.fitted.optimizer

    def step(self) -> None:
        self.fitted.step(self.batch)


def peak_of(run: TorchSteps | FitSteps) -> int:
    """Returns the most bytes of the first steps, in which the optimizer makes its state. What
    libraries allocate once per process is to have been allocated before."""
    import headroom.memory

    gc.collect()
    with headroom.memory.track(run.model, run.optimizer, batch=run.batch, stacks=False) as tracked:
        for _ in range(STEPS):
            run.step()
    return tracked.peak_bytes


@dataclass
class Times:
    """Seconds of steps: of the clock, and of the processors."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def described(self) -> dict[str, float]:
        return {
            "seconds": statistics.median(self.wall),
            "cpu_seconds": statistics.median(self.cpu),
        }


def timed(steps: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, Times]:
    """Returns the times of steps, which are warm: every round makes one of each, in random order,
    so that a slow phase of the machine is one of all of them."""
    times = {name: Times() for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                wall, cpu = time.perf_counter(), time.process_time()
                steps[name]()
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
    finally:
        gc.enable()
    return times


def ratios(over: Times, under: Times) -> dict[str, float]:
    """Returns the median over rounds of one time divided by the other."""
    pairs = {
        "ratio": zip(over.wall, under.wall, strict=True),
        "cpu_ratio": zip(over.cpu, under.cpu, strict=True),
    }
    return {name: statistics.median(a / b for a, b in both) for name, both in pairs.items()}
