"""Files that reports are made of, small and made up, with numbers that are easy to count again."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from headroom.memory import Allocation, Span, Timeline
from headroom.memory.events import KINDS
from headroom.planning import DeviceShare, Plan

__all__ = ["ladder", "plan", "profile", "rehearsal", "snapshot", "timeline", "write_snapshot"]


def frames(module: int, line: int) -> list[dict[str, Any]]:
    """A stack as torch records it, innermost first."""
    return [
        {"name": "linear", "filename": "/x/site-packages/torch/nn/functional.py", "line": 5},
        {"name": "forward", "filename": f"/me/model/block{module}.py", "line": line},
        {"name": "train", "filename": "/me/train.py", "line": 12},
        {"name": "<module>", "filename": "/me/train.py", "line": 99},
    ]


def snapshot(events: int, seed: int = 0) -> dict[str, Any]:
    """A snapshot of torch's CUDA allocator with so many events, rising and falling three times; all
    that is live at the end is in segments, beside free blocks."""
    rng = random.Random(seed)
    stacks = [frames(module, line) for module in range(20) for line in (30, 41)]
    trace: list[dict[str, Any]] = []
    live: list[tuple[int, int, list]] = []
    address, time = 1 << 40, 0
    for number in range(events):
        time += rng.randrange(1, 50)
        rises = number * 6 // max(1, events) % 2 == 0
        if not live or rng.random() < (0.62 if rises else 0.38):
            size = rng.choice([500, 4096, 1 << 16, 1 << 20]) + rng.randrange(400)
            address += 4 << 20
            live.append((address, size, rng.choice(stacks)))
            action, (at, size, stack) = "alloc", live[-1]
        else:
            action, (at, size, stack) = "free_completed", live.pop(rng.randrange(len(live)))
        entry = {"action": action, "addr": at, "size": size, "stream": 0, "time_us": time}
        trace.append(entry | {"frames": stack, "user_metadata": "", "compile_context": "N/A"})
    return {
        "segments": [_segment(one) for one in live],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _segment(one: tuple[int, int, list]) -> dict[str, Any]:
    """A segment of 2 MiB with one block in use and a free one behind it."""
    address, size, stack = one
    used, total = (size + 511) // 512 * 512, 2 << 20
    rest = {"address": address + used, "size": total - used, "requested_size": 0}
    return {
        "device": 0, "address": address, "total_size": total, "allocated_size": used,
        "active_size": used, "requested_size": size, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "blocks": [
            {"address": address, "size": used, "requested_size": size,
             "state": "active_allocated", "frames": stack},
            rest | {"state": "inactive", "frames": []},
        ],
    }  # fmt: skip


def write_snapshot(path: Path, value: dict[str, Any]) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=4))
    return path


def timeline(count: int = 200, seed: int = 0, module: str = "layers.{}.mlp") -> Timeline:
    """Allocations of all kinds, with modules, ops and lines."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    made = []
    for number in range(count):
        start = rng.randrange(1, 2 * count)
        end = rng.choice([None, start + rng.randrange(1, count)])
        size = rng.randrange(1, 1 << 22)
        stack = (f"model/block.py:{number % 7} forward", "train.py:12 main")
        one = Allocation(number, size, start, end, kinds[number % len(kinds)], stack=stack)
        one.module = None if number % 11 == 0 else module.format(number % 5)
        one.op, one.step = "aten::mm", number % 2
        made.append(one)
    half = count
    spans = [Span(0, 0, "forward"), Span(half, 0, "backward"), Span(half * 3 // 2, 0, "optimizer")]
    return Timeline(made, spans, "cuda", ["A note."])


def plan(count: int = 200) -> Plan:
    share = DeviceShare(1000, 2000, 3000, 400 << 20, "made up")
    return Plan(timeline(count), share, "Model", {"optimizer": "AdamW"})


def ladder(rungs: int = 4) -> dict[str, Any]:
    """What ``examples/ladder.py`` writes, as far as a report reads it."""
    made = []
    for number in range(rungs):
        part = 64 << 20 >> number
        made.append(
            {
                "key": f"r{number}",
                "title": f"rung {number}",
                "peak_bytes": 5 * part,
                "predicted_peak_bytes": 5 * part + 1000,
                "bytes": {
                    "parameters": part,
                    "gradients": part,
                    "optimizer state": part,
                    "saved activations": part,
                },
                "bytes_per_parameter": 16.0 / 2**number,
                "held_out_bits_per_byte": 2.5,
                "tokens_per_second": 12345.6,
                "seconds": 9.5,
            }
        )
    return {"versions": {"torch": "2"}, "machine": {}, "rungs": made}


def profile(modules: int = 12) -> dict[str, Any]:
    """What ``headroom.profile`` writes, as far as a report reads it."""
    phases = {"data": 500.0, "forward": 4e3, "backward": 8e3, "optimizer": 2e3, "other": 100.0}
    wall = sum(phases.values())
    steps = [
        {"number": n, "start_us": n * wall, "wall_us": wall, "complete": True, "phases_us": phases}
        for n in range(3)
    ]

    def figures(scale: float) -> dict[str, Any]:
        times = {"forward_us": 300 * scale, "backward_us": 600 * scale, "recompute_us": 0.0}
        counts = {"model_flops": int(1e9 * scale), "recomputed_flops": 0}
        sizes = {"allocated_bytes": int(2e6 * scale), "kept_bytes": int(1e6 * scale)}
        return {**times, "device_us": None, **counts, **sizes}

    return {
        "format": "headroom.profile", "version": 1, "created": "2026-01-01T00:00:00+00:00",
        "headroom": "0.2.0", "torch": "2.15.0", "device": {"type": "cpu", "name": "a CPU"},
        "rank": 0, "cycle": 0, "trace": None, "complete": True, "ended_by": None,
        "settings": {"record_shapes": False}, "steps": steps,
        "totals": {
            "steps": 3, "wall_us": 3 * wall, "loader_us": 900.0, "recompute_us": 0.0,
            "phases_us": {name: 3 * us for name, us in phases.items()}, "device_us": None,
            "model_flops": 3_000_000_000, "recomputed_flops": 0, "mfu": 0.41, "hfu": 0.41,
        },
        "modules": [
            {"name": "" if n == 0 else f"layers.{n}", "type": "Block", "calls": 3,
             "recomputed_calls": 0, "self": figures(n + 0.5), "total": figures(n + 1),
             "parameter_bytes": 1000 * n, "optimizer_bytes": 2000 * n, "peak_bytes": None}
            for n in range(modules)
        ],
        "outside": figures(0.1),
        "ops": [
            {"name": f"aten::op{n}", "calls": 3 * n, "total_us": 50.0 * n, "self_us": 40.0 * n,
             "device_us": None, "model_flops": 10**6 * n, "recomputed_flops": 0,
             "bytes": 4096 * n, "bytes_are": "counted", "bytes_per_s": 1e9}
            for n in range(1, 9)
        ],
        "memory": {
            "cpu": {"peak_bytes": 4 << 20, "points": [[10.0 * n, n << 20] for n in range(5)]}
        },
        "notes": ["A note."],
    }  # fmt: skip


def rehearsal() -> dict[str, Any]:
    """The report of a program that does not fit: 52 MiB and 1,024 bytes of tensors, of which the
    gradients have no line."""
    mib = 1 << 20
    rows = [
        ("parameters", ["model.py:3 Block", "train.py:9 main"], 20 * mib, 8),
        ("optimizer_state", ["train.py:14 main"], 16 * mib, 16),
        ("gradients", [], 10 * mib, 8),
        (None, ["model.py:12 forward", "train.py:12 main"], 6 * mib + 1000, 3),
    ]
    return {
        "format": "headroom.rehearsal/1",
        "program": ["train.py", "--batch", "8"],
        "device": {"name": "T4", "memory": 600 * mib, "context": 300 * mib, "capability": 75},
        "versions": {"python": "3.11.1", "torch": "2.14.0", "trl": "1.0"},
        "fits": False,
        "peak_allocated": 52 * mib + 1024,
        "peak_reserved": 92 * mib,
        "host": {"peak": 700 * mib},
        "steps": 2,
        "after_step": {"parameters": 20 * mib, "gradients": 20 * mib, "optimizer_state": 16 * mib},
        "refused": [{"asked": 300 * mib, "allocated": 52 * mib, "line": "train.py:15"}],
        "unknown_reads": {"train.py:16 aten::_local_scalar_dense": 2},
        "at_peak": [dict(zip(("kind", "stack", "bytes", "count"), row)) for row in rows],
    }
