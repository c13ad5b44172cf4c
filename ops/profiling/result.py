"""The sums of a recorded cycle: :class:`ProfileResult`, and the file of it.

``NAME.profile.json`` beside the trace is :meth:`ProfileResult.to_dict` as JSON. All times are in
microseconds and start at the begin of the first recorded step; figures of modules and ops are sums
over the recorded steps, so divide them by ``len(steps)``. Version 1::

    format          "headroom.profile"
    version         1
    created         ISO 8601 with time zone
    headroom, torch version strings
    device          {"type": "cpu" | "cuda", "name": str}
    rank, cycle     which process wrote it, and which cycle of the schedule it is, both from 0
    trace           name of the trace file beside this one, or null
    complete        false if the with block ended while the cycle was being recorded
    ended_by        name of the exception that ended it, or null
    settings        {"record_shapes", "profile_memory", "with_stack": bool}
    steps           [{"number": of the step, "start_us", "wall_us": float,
                      "complete": whether prof.step() ended it,
                      "phases_us": {"data", "forward", "backward", "optimizer", "other": float},
                      "loader_us": within torch's DataLoader, "recompute_us": float,
                      "device_us": kernels, float or null,
                      "model_flops", "recomputed_flops": int}]
                    the phases of a step add up to its wall_us
    totals          {"steps": int, "wall_us", "phases_us", "loader_us", "recompute_us", "device_us",
                     "model_flops", "recomputed_flops": sums over the steps,
                     "flops_by_dtype": {"float32": both kinds of FLOPs, int},
                     "mfu", "hfu": fraction of the peak rate, float or null}
                    hfu counts recomputed FLOPs too
    peak_rate       {"source": "given" | "measured" | "published" | "unknown", "about": str,
                     "by_dtype": {"float32": FLOP/s}}
    modules         [{"name": "" for the model, else as in named_modules(), "type": its class,
                      "calls": in forward passes, "recomputed_calls": int,
                      "self": figures without, "total": figures with the modules inside it,
                      "parameter_bytes", "optimizer_bytes": of its own parameters and those inside,
                      "peak_bytes": most live at once while it ran, or null}]
                    in the order of the model, without those that neither ran nor hold parameters
    figures         {"forward_us", "backward_us", "recompute_us": float, "device_us": float or null,
                     "model_flops", "recomputed_flops": int,
                     "allocated_bytes": by all three, "kept_bytes": allocated less freed in the
                     forward pass: int or null}
    outside         figures of what belongs to no module: the loss, sums of gradients, the engine
                    of autograd; not the optimizer and the data
    ops             [{"name", "calls": int, "total_us", "self_us": float, "device_us": or null,
                      "model_flops", "recomputed_flops": int,
                      "bytes": int or null, "bytes_are": "counted" | "estimate" | null,
                      "bytes_per_s": bytes over the time of the calls, float or null}]
                    by self_us, the largest first
    memory          {"cpu" | "cuda:0": {"peak_bytes": int, "points": [[us, live bytes], ...]}}
                    above what was live when the recording started; at most 2,000 points, each
                    the largest of its interval
    notes           [sentences about what could not be seen]

Numbers that are null were not recorded.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from .._core import binaries
from ..step.pytree import plain_tensors, tensors_in
from .rates import PeakRate

__all__ = ["Figures", "ModuleRow", "OpRow", "ProfileResult", "StepRow"]

FORMAT, VERSION = "headroom.profile", 1


@dataclass
class Figures:
    """The time, work and memory of something, over all steps. See the module's docstring."""

    forward_us: float = 0.0
    backward_us: float = 0.0
    recompute_us: float = 0.0
    device_us: float | None = None
    model_flops: int = 0
    recomputed_flops: int = 0
    allocated_bytes: int | None = None
    kept_bytes: int | None = None

    @property
    def host_us(self) -> float:
        """Returns the time of the host in all three."""
        return self.forward_us + self.backward_us + self.recompute_us

    def add(self, other: Figures) -> None:
        """Adds the figures of something else to these."""
        for name, value in vars(other).items():
            if value is not None:
                setattr(self, name, (getattr(self, name) or 0) + value)


@dataclass
class ModuleRow:
    """A module of the model. See the module's docstring."""

    name: str
    type: str
    calls: int = 0
    recomputed_calls: int = 0
    self: Figures = field(default_factory=Figures)
    total: Figures = field(default_factory=Figures)
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    peak_bytes: int | None = None


@dataclass
class OpRow:
    """An operation. See the module's docstring."""

    name: str
    calls: int = 0
    total_us: float = 0.0
    self_us: float = 0.0
    device_us: float | None = None
    model_flops: int = 0
    recomputed_flops: int = 0
    bytes: int | None = None
    bytes_are: str | None = None
    bytes_per_s: float | None = None


@dataclass
class StepRow:
    """A step. See the module's docstring."""

    number: int
    start_us: float
    wall_us: float
    complete: bool
    phases_us: dict[str, float]
    loader_us: float
    recompute_us: float
    device_us: float | None
    model_flops: int
    recomputed_flops: int


@dataclass
class ProfileResult:
    """The sums of a recorded cycle. The fields are those of the file that the module's
    docstring describes."""

    device: dict[str, str]
    rank: int
    cycle: int
    settings: dict[str, bool]
    steps: list[StepRow]
    flops_by_dtype: dict[str, int]
    model_flops_by_dtype: dict[str, int]
    peak_rate: PeakRate
    modules: list[ModuleRow]
    outside: Figures
    ops: list[OpRow]
    memory: dict[str, dict[str, Any]]
    notes: list[str]
    trace: str | None = None
    complete: bool = True
    ended_by: str | None = None

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over the steps, and utilization."""
        steps = self.steps
        phases: dict[str, float] = {}
        for step in steps:
            for name, us in step.phases_us.items():
                phases[name] = phases.get(name, 0.0) + us
        on_device = [s.device_us for s in steps if s.device_us is not None]
        wall = sum(s.wall_us for s in steps)
        return {
            "steps": len(steps),
            "wall_us": wall,
            "phases_us": phases,
            "loader_us": sum(s.loader_us for s in steps),
            "recompute_us": sum(s.recompute_us for s in steps),
            "device_us": sum(on_device) if on_device else None,
            "model_flops": sum(s.model_flops for s in steps),
            "recomputed_flops": sum(s.recomputed_flops for s in steps),
            "flops_by_dtype": self.flops_by_dtype,
            "mfu": self._utilization(self.model_flops_by_dtype, wall),
            "hfu": self._utilization(self.flops_by_dtype, wall),
        }

    def _utilization(self, flops: dict[str, int], wall_us: float) -> float | None:
        seconds = self.peak_rate.seconds(flops)
        return None if not seconds or not wall_us else seconds / (wall_us * 1e-6)

    def to_dict(self) -> dict[str, Any]:
        """Returns what the file beside the trace holds; see the module's docstring."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "headroom": binaries.VERSION,
            "torch": torch.__version__,
            "device": self.device,
            "rank": self.rank,
            "cycle": self.cycle,
            "trace": self.trace,
            "complete": self.complete,
            "ended_by": self.ended_by,
            "settings": self.settings,
            "steps": [asdict(step) for step in self.steps],
            "totals": self.totals,
            "peak_rate": asdict(self.peak_rate),
            "modules": [asdict(row) for row in self.modules],
            "outside": asdict(self.outside),
            "ops": [asdict(row) for row in self.ops],
            "memory": self.memory,
            "notes": self.notes,
        }

    def to_json(self) -> str:
        """Returns :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)


def bytes_of_parameters(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Mapping[str, tuple[int, int]]:
    """Returns the bytes of the parameters of each module itself, and of their optimizers' states,
    each parameter at its first name."""

    def size(value: Any) -> int:
        return sum(part.nbytes for tensor in tensors_in(value) for part in plain_tensors(tensor))

    found: dict[str, tuple[int, int]] = {}
    for name, param in model.named_parameters():
        states = sum(size(o.state[param]) for o in optimizers if param in o.state)
        owner = name.rpartition(".")[0]
        before = found.get(owner, (0, 0))
        found[owner] = before[0] + size(param), before[1] + states
    return found
