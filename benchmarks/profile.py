"""Training steps while they are profiled: headroom.profile, and torch.profiler with the same
settings, while they record and while their schedules do not, beside no profiler.

Starting a profiler, and what it does when a recording ends, is not timed. The bars compare lower
quartiles of the CPU time of steps, which other programs disturb less than the time of the clock.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity

from .harness import Case, Contender, Share

CPU_TIME = "CPU us of a step"


class Sessions:
    """Lets one profiler run at a time, because torch allows no more."""

    def __init__(self) -> None:
        self._running: Any = None

    def switch(self, make: Callable[[], Any] | None) -> None:
        """Ends the profiler that runs and starts another."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None
            gc.collect()  # recordings are large, and the harness collects nothing while it times
        self._running = None if make is None else make()
        if self._running is not None:
            self._running.__enter__()

    def step(self) -> None:
        if self._running is not None:
            self._running.step()


def _lower_quartile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def ours(model: nn.Module, optimizer: torch.optim.Optimizer, action: ProfilerAction) -> Any:
    import headroom

    return headroom.profile(
        model=model, optimizer=optimizer, schedule=lambda _: action, peak_flops=1e12
    )


def theirs(device: torch.device, action: ProfilerAction) -> Any:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities, schedule=lambda _: action, record_shapes=True, profile_memory=True
    )


def case(name: str, shape: tuple[int, int, int], steps: int) -> Case:
    layers, width, tokens = shape

    def setup(device: torch.device) -> dict[str, Callable[[], Contender]]:
        from headroom.nn import Transformer, TransformerConfig

        config = TransformerConfig(
            hidden_size=width,
            layers=layers,
            heads=4,
            features=4 * width,
            vocab_size=1024,
            save="L3",
        )
        model = Transformer(config, device=device)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(1024, (2, tokens // 2), device=device)
        sessions = Sessions()

        def run(took: list[float]) -> None:
            for _ in range(steps):
                began = time.process_time()
                logits = model(ids)
                nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                sessions.step()
                took.append(time.process_time() - began)

        def contender(make: Callable[[], Any] | None) -> Contender:
            took: list[float] = []
            return Contender(
                partial(run, took),
                prepare=partial(sessions.switch, make),
                counts=lambda: {CPU_TIME: 1e6 * _lower_quartile(took)},
            )

        records, rests = ProfilerAction.RECORD, ProfilerAction.NONE
        makers = {
            "headroom": partial(ours, model, optimizer, records),
            "torch.profiler": partial(theirs, device, records),
            "headroom, not recording": partial(ours, model, optimizer, rests),
            "torch.profiler, not recording": partial(theirs, device, rests),
            "no profiler": None,
        }
        return {name: partial(contender, make) for name, make in makers.items()}

    return Case(
        name,
        f"{steps} steps of {layers} blocks of width {width} at L3 on {tokens} tokens, f32",
        setup,
        "torch.profiler",
        bars=[
            Share(CPU_TIME, "headroom", "torch.profiler", at_most=1.03, device="cpu"),
            Share(CPU_TIME, "headroom, not recording", "no profiler", at_most=1.005, device="cpu"),
        ],
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    if quick:
        return [case("tiny", (1, 16, 8), 1)]
    return [case("small ops", (6, 64, 32), 8), case("medium ops", (4, 256, 256), 2)]
