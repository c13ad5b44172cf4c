"""What calls of ops are predicted to take on each GPU, from counts of the compiled kernels."""

from __future__ import annotations

import importlib
from pathlib import Path

from .call import Call, Step
from .disassembly import Key, kernel_name
from .model import Device, Launch, Prediction, predict
from .rows import Found

CALLS: list[Call] = [
    call
    for path in sorted(Path(__file__).parents[1].glob("[!_]*.py"))
    for call in getattr(importlib.import_module(f"benchmarks.{path.stem}"), "CALLS", ())
]


def launch(
    step: Step,
    device: Device,
    found: dict[tuple[str, str, str], Found],
    usage: dict[Key, dict[str, int]],
) -> Launch | None:
    """Returns a step on a device, or None if the library has no code of it."""
    parts = [(found.get((device.arch, step.kernel, mix)), count) for mix, count in step.rows]
    if any(part is None for part, _ in parts):
        return None
    taken = [
        of
        for (arch, symbol), of in usage.items()
        if arch == device.arch
        and (symbol == parts[0][0].symbol if parts else kernel_name(symbol) == step.kernel)
    ]
    if not taken:
        return None
    return Launch(
        step.blocks,
        step.threads,
        step.traffic,
        sum(part.instructions * count for part, count in parts),
        step.waits,
        taken[0]["REG"],
        taken[0]["SHARED"] + step.shared,
    )


def predictions(
    call: Call,
    device: Device,
    found: dict[tuple[str, str, str], Found],
    usage: dict[Key, dict[str, int]],
) -> list[Prediction]:
    """Returns those of a call's steps, or none if the library has no code of one."""
    launches = [launch(step, device, found, usage) for step in call.steps]
    return [] if None in launches else [predict(device, one) for one in launches]
