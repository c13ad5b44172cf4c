"""Sums a recording up by step, module and operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .arguments import ListTypes
from .events import Call, Memory, Recording
from .phases import PHASES, intervals
from .rates import peak_rate
from .result import (
    Figures,
    ModuleRow,
    OpRow,
    ProfileResult,
    StepRow,
    bytes_of_parameters,
)
from .work import Work, Worker, optimizer_bytes

__all__ = ["analyze"]

_POINTS = 2000  # of a curve of memory
_WAITS = 0.05  # of a step, for its batch, of which nothing is said


def analyze(
    recording: Recording,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    types: ListTypes,
    ended: set[int],
    *,
    device: torch.device,
    peak_flops: float | None,
    rank: int,
    cycle: int,
    settings: dict[str, bool],
) -> ProfileResult:
    """Returns the sums. ``ended`` are the numbers of the steps that ``prof.step()`` has ended; the
    others count only if there is none of those."""
    complete = {n: s for n, s in recording.steps.items() if n in ended}
    chosen = complete or recording.steps
    notes: list[str] = []
    if not complete:
        notes.append("No step was ended by prof.step() while it was recorded.")
    inside = _Inside(chosen)
    calls = [call for call in recording.calls if inside.number(call.start) is not None]
    worker = Worker(types)
    work = list(worker.of(calls))
    kernels = recording.has_device
    sums = _Modules(model, optimizers, kernels)
    sums.add_calls(calls)
    sums.add_work(work)
    flops: dict[str, int] = {}
    model_flops: dict[str, int] = {}
    for _, one in work:
        if one.flops:
            flops[one.dtype] = flops.get(one.dtype, 0) + one.flops
            model_flops[one.dtype] = model_flops.get(one.dtype, 0) + one.flops - one.again
    curves = {}
    if settings["profile_memory"]:
        sums.add_memory(recording.memory, inside)
        curves = _curves(recording.memory, inside.start)
    notes += _unseen(calls, kernels, device)
    if worker.uncounted:
        notes.append(f"FLOPs leave out {', '.join(sorted(worker.uncounted))}: no formula is known.")
    steps = _steps(recording, chosen, complete, inside, calls, work)
    notes += _waits(steps)
    return ProfileResult(
        device={"type": device.type, "name": _name_of(device)},
        rank=rank,
        cycle=cycle,
        settings=settings,
        steps=steps,
        flops_by_dtype=flops,
        model_flops_by_dtype=model_flops,
        peak_rate=peak_rate(device, flops, peak_flops),
        modules=sums.rows(),
        outside=sums.outside,
        ops=_ops(calls, work, optimizers, kernels),
        memory=curves,
        notes=notes,
    )


class _Inside:
    """Tells in which step a moment is."""

    def __init__(self, steps: dict[int, Call]) -> None:
        self._steps = sorted((s.start, s.end, n) for n, s in steps.items())
        self.start = self._steps[0][0] if self._steps else 0

    def number(self, time: int) -> int | None:
        return next((n for start, end, n in self._steps if start <= time < end), None)


def _steps(
    recording: Recording,
    chosen: dict[int, Call],
    complete: dict[int, Call],
    inside: _Inside,
    calls: list[Call],
    work: list[tuple[Call, Work]],
) -> list[StepRow]:
    rows: dict[int, StepRow] = {}
    for number, step in sorted(chosen.items()):
        phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for start, end, phase in intervals(recording, step):
            phases[phase] += (end - start) / 1e3
        rows[number] = StepRow(
            number=number,
            start_us=(step.start - inside.start) / 1e3,
            wall_us=(step.end - step.start) / 1e3,
            complete=number in complete,
            phases_us=phases,
            loader_us=0.0,
            recompute_us=0.0,
            device_us=0.0 if recording.has_device else None,
            model_flops=0,
            recomputed_flops=0,
        )
    for call in calls:
        row = rows[inside.number(call.start)]  # type: ignore[index]
        if call.again:
            row.recompute_us += call.own_ns / 1e3
        if call.is_loader and not (call.parent and call.parent.phase == "data"):
            row.loader_us += (call.end - call.start) / 1e3
        if row.device_us is not None:
            row.device_us += call.device_ns / 1e3
    for call, one in work:
        row = rows[inside.number(call.start)]  # type: ignore[index]
        row.model_flops += one.flops - one.again
        row.recomputed_flops += one.again
    return list(rows.values())


class _Modules:
    """Figures of modules, and of what belongs to none."""

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], kernels: bool
    ) -> None:
        self._kernels = kernels
        self._own = bytes_of_parameters(model, optimizers)
        self._rows = {
            name: ModuleRow(name, type(module).__name__, self=self._figures())
            for name, module in model.named_modules()
        }
        self.outside = self._figures()

    def _figures(self) -> Figures:
        return Figures(device_us=0.0 if self._kernels else None)

    def _of(self, call: Call | None) -> Figures:
        row = None if call is None or call.module is None else self._rows.get(call.module)
        return self.outside if row is None else row.self

    def add_calls(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if call.phase in ("optimizer", "data"):
                continue
            figures = self._of(call)
            us = call.own_ns / 1e3
            if call.again:
                figures.recompute_us += us
            elif call.phase == "backward":
                figures.backward_us += us
            else:
                figures.forward_us += us
            if figures.device_us is not None:
                figures.device_us += call.device_ns / 1e3
            if call.label is not None and (row := self._rows.get(call.label)) is not None:
                row.calls += not call.again
                row.recomputed_calls += call.again

    def add_work(self, work: Iterable[tuple[Call, Work]]) -> None:
        for call, one in work:
            figures = self._of(call)
            figures.model_flops += one.flops - one.again
            figures.recomputed_flops += one.again

    def add_memory(self, memory: Iterable[Memory], inside: _Inside) -> None:
        """Adds allocations, and the most that was live at once while a module ran, above what was
        live when the recording started."""
        for row in self._rows.values():
            row.self.allocated_bytes = row.self.kept_bytes = 0
        self.outside.allocated_bytes = self.outside.kept_bytes = 0
        live: dict[str, int] = {}
        for event in memory:
            now = live[event.device] = live.get(event.device, 0) + event.bytes
            call = event.call
            if inside.number(event.time) is None:
                continue
            if call is not None and call.phase in ("optimizer", "data"):
                continue
            figures = self._of(call)
            figures.allocated_bytes += max(0, event.bytes)  # type: ignore[operator]
            if call is not None and call.phase == "forward":
                figures.kept_bytes += event.bytes  # type: ignore[operator]
            if call is not None and (row := self._rows.get(call.module or "")) is not None:
                if call.module is not None:
                    row.peak_bytes = max(row.peak_bytes or 0, now)

    def rows(self) -> list[ModuleRow]:
        """Returns the modules in order, those inside counted in, without those that nothing is
        in."""
        for name, row in self._rows.items():
            params, states = self._own.get(name, (0, 0))
            peak = row.peak_bytes
            for outer in _outer(name):
                above = self._rows[outer]
                above.total.add(row.self)
                above.parameter_bytes += params
                above.optimizer_bytes += states
                if peak is not None:
                    above.peak_bytes = max(above.peak_bytes or 0, peak)
        return [row for row in self._rows.values() if row.total.host_us or row.parameter_bytes]


def _outer(name: str) -> Iterable[str]:
    """Returns a module's name and the names of those around it."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _ops(
    calls: Iterable[Call],
    work: Iterable[tuple[Call, Work]],
    optimizers: list[torch.optim.Optimizer],
    kernels: bool,
) -> list[OpRow]:
    rows: dict[str, OpRow] = {}
    for call in calls:
        if call.label is not None or call.is_node:
            continue
        name = _op_name(call)
        row = rows.setdefault(name, OpRow(name))
        if call.parent is None or _op_name(call.parent) != name:  # not as aten::sum in aten::sum
            row.calls += 1
            row.total_us += (call.end - call.start) / 1e3
        row.self_us += call.own_ns / 1e3
        if kernels:
            row.device_us = (row.device_us or 0.0) + call.device_ns / 1e3
    moving: dict[str, float] = {}  # microseconds of the calls whose bytes are known
    for call, one in work:
        row = rows[call.name]
        row.model_flops += one.flops - one.again
        row.recomputed_flops += one.again
        if one.bytes is not None:
            row.bytes = (row.bytes or 0) + one.bytes
            row.bytes_are = "counted" if one.counted and row.bytes_are != "estimate" else "estimate"
            took = call.device_ns if kernels else call.end - call.start
            moving[call.name] = moving.get(call.name, 0.0) + took / 1e3
    for optimizer in optimizers:
        row = rows.get(f"Optimizer.step#{type(optimizer).__name__}.step")
        if row is not None and not kernels and (size := optimizer_bytes(optimizer)):
            alike = [o for o in optimizers if type(o) is type(optimizer)]
            calls_each = row.calls // len(alike)
            row.bytes, row.bytes_are = (row.bytes or 0) + size * calls_each, "estimate"
            moving[row.name] = row.total_us
    for name, us in moving.items():
        row = rows[name]
        if us and row.bytes is not None:
            row.bytes_per_s = row.bytes / (us * 1e-6)
    return sorted(rows.values(), key=lambda row: (-row.self_us, row.name))


def _op_name(call: Call) -> str:
    """Returns the name of an operation. An autograd function of ours runs within the op that it is
    of."""
    name, outer = call.name, call.parent
    if outer is not None and name.startswith("headroom::") and name == f"{outer.name}_forward":
        return outer.name
    return name


def _curves(memory: Iterable[Memory], start: int) -> dict[str, dict[str, Any]]:
    found: dict[str, list[tuple[float, int]]] = {}
    for event in memory:
        points = found.setdefault(event.device, [])
        live = (points[-1][1] if points else 0) + event.bytes
        points.append(((event.time - start) / 1e3, live))
    return {
        device: {"peak_bytes": max(live for _, live in points), "points": _thinned(points)}
        for device, points in sorted(found.items())
    }


def _thinned(points: list[tuple[float, int]]) -> list[list[float]]:
    """Returns at most some of the points: the largest of each of as many intervals."""
    size = -(-len(points) // _POINTS)
    groups = (points[k : k + size] for k in range(0, len(points), size))
    return [list(max(group, key=lambda point: point[1])) for group in groups]


def _unseen(calls: Iterable[Call], kernels: bool, device: torch.device) -> list[str]:
    names = {call.name for call in calls}
    notes = []
    if any(name.startswith(("Torch-Compiled Region", "CompiledFunction")) for name in names):
        notes.append(
            "Compiled regions were recorded as a whole: modules inside them have no ranges, and "
            "products that the compiler fused into its own kernels are not counted."
        )
    if not any(call.label is not None for call in calls):
        notes.append("No module of the model was called while it was recorded.")
    if device.type == "cuda" and not kernels:
        notes.append("The model is on a GPU, but no kernels were recorded.")
    return notes


def _waits(steps: list[StepRow]) -> list[str]:
    wall, loader = sum(s.wall_us for s in steps), sum(s.loader_us for s in steps)
    if loader <= _WAITS * wall:
        return []
    return [
        f"Steps wait {loader / wall:.0%} of their time for the DataLoader: "
        "headroom.data.advise(loader, prof) says which settings would change that."
    ]


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"
