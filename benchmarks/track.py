"""What it costs to look on: a step of the demo under headroom.memory.track, read included."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .harness import Case, Contender, Share
from .snapshot import SIZES, Run

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
RUNGS = ("torch", "L1", "L5", "everything", "checkpoint")
BAR = 1.10  # times a step that nobody looks at


class Demo:
    """A run of one rung of the demo, on bytes drawn at random."""

    def __init__(self, rung: str, size: str, device: torch.device) -> None:
        if EXAMPLES not in sys.path:
            sys.path.insert(0, EXAMPLES)
        from data import Text
        from model import SIZES
        from run import Run
        from rungs import RUNGS

        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(256, (1 << 16,), generator=generator, dtype=torch.uint8)
        self.text = Text(drawn, torch.ones(256, dtype=torch.int64))
        self.run = Run(RUNGS[rung], SIZES[size], device, 0)
        self.run.step(self.text)

    def step(self) -> None:
        self.run.step(self.text)

    def tracked(self, stacks: bool = False) -> Any:
        import headroom

        model, optimizer = self.run.model, self.run.optimizer
        with headroom.memory.track(model, optimizer, stacks=stacks) as found:
            self.step()
        return found


class Small(Demo):
    """Steps of operations that take about as long as to look at them."""

    def __init__(self, device: torch.device) -> None:
        self.run = Run(*SIZES["small-operations"], device)

    def step(self) -> None:
        self.run.steps()


def headroom_track(demo: Demo, stacks: bool = False) -> Contender:
    return Contender(lambda: demo.tracked(stacks).timeline, counts=lambda: _counts(demo))


def recorded_only(demo: Demo) -> Contender:
    return Contender(lambda: demo.tracked())


def torch_profiler(demo: Demo) -> Contender:
    """The same events, which only start and end."""

    def step() -> None:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as found:
            demo.step()
        found.events()

    return Contender(step)


def _counts(demo: Demo) -> dict[str, float]:
    tracked = demo.tracked()
    return {"allocations": len(tracked.timeline.allocations), "events": tracked.timeline.events}


def cases(device: torch.device, quick: bool) -> list[Case]:
    size = "tiny" if quick else "small"

    def setup(demo_on: Any, device: torch.device) -> dict[str, Any]:
        demo = demo_on(device)
        return {
            "headroom": partial(headroom_track, demo),
            "headroom, stacks=True": partial(headroom_track, demo, True),
            "recorded, not read": partial(recorded_only, demo),
            "torch.profiler": partial(torch_profiler, demo),
            "a step": lambda: Contender(demo.step),
        }

    small = Case(
        name="small-operations",
        what="5 steps of 4 blocks of LayerNorm, Linear, GELU, Linear on 16 x 16",
        setup=partial(setup, Small),
        against="a step",
    )
    return [
        Case(
            name=rung,
            what=f"a step of the demo's rung {rung}",
            setup=partial(setup, partial(Demo, rung, size)),
            against="a step",
            bars=[Share("time", "headroom", "a step", at_most=BAR, device="cpu")],
        )
        for rung in (("torch",) if quick else RUNGS)
    ] + [small]
