"""Times contenders interleaved: every round calls every contender once, in random order.

A slow phase of the machine then affects all contenders alike, and ratios within one round are more
reliable than the ratio of two medians.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Contender:
    """One way to do the work. `prepare` runs before every call and is not timed. `counts` is called
    once behind the timing, for what is counted in the place of being timed, such as bytes."""

    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    work: int | None = None  # least bytes (or FLOPs) of one call, where it differs from the case's
    counts: Callable[[], dict[str, float]] | None = None


@dataclass
class Settings:
    rounds: int = 30
    sample_s: float = 0.02  # shortest sample: a call that takes less is repeated within the sample
    warmup_s: float = 0.2
    seed: int = 0


@dataclass
class Timing:
    """Seconds per call, one value a round."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 1
    work: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float | None:
        return self.work / self.median if self.work else None


def _once(contender: Contender, calls: int, device: torch.device) -> float:
    """Returns the seconds that `calls` calls take, without their preparation."""
    if contender.prepare is not None:
        total = 0.0
        for _ in range(calls):
            contender.prepare()
            total += _once(Contender(contender.call), 1, device)
        return total
    call = contender.call
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / 1e3
    # With one thread, the processor time of this process: other work on the machine does not count,
    # and threads that a library keeps of its own do.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(calls):
        call()
    return clock() - start


def _warm_up(contender: Contender, device: torch.device, settings: Settings) -> int:
    """Runs the contender until it is warm and returns how many calls make up one sample."""
    deadline = time.perf_counter() + settings.warmup_s
    _once(contender, 1, device)  # loads code and creates states
    fastest = _once(contender, 1, device)
    while time.perf_counter() < deadline:
        fastest = min(fastest, _once(contender, 1, device))
    return min(10_000, max(1, round(settings.sample_s / max(fastest, 1e-7))))


def measure(
    contenders: dict[str, Contender], device: torch.device, settings: Settings
) -> dict[str, Timing]:
    timings = {
        name: Timing(calls=_warm_up(contender, device, settings), work=contender.work)
        for name, contender in contenders.items()
    }
    order = list(contenders)
    shuffle = random.Random(settings.seed).shuffle
    # A collection triggered by one contender's garbage must not be charged to another.
    collecting = gc.isenabled()
    if settings.warmup_s > 0:  # without it nothing is timed in earnest
        gc.collect()
    gc.disable()
    try:
        for _ in range(settings.rounds):
            shuffle(order)
            for name in order:
                timing = timings[name]
                timing.seconds.append(_once(contenders[name], timing.calls, device) / timing.calls)
    finally:
        if collecting:
            gc.enable()
    return timings


def ratios(over: Timing, under: Timing) -> list[float]:
    """Returns, for each round, the time of `over` divided by the time of `under`."""
    return [a / b for a, b in zip(over.seconds, under.seconds)]
