"""Prints the table, and collects what the JSON records about the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import subprocess

import torch

from ._limits import cache_bytes, memory_bytes

GPU_STATE = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
UNITS = {"byte": ("GB/s", 1e9), "flop": ("TFLOP/s", 1e12)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            cwd=os.path.dirname(os.path.abspath(__file__)),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _first_line(path: str, start: str = "") -> str | None:
    try:
        with open(path) as file:
            return next((line.strip() for line in file if line.startswith(start)), None)
    except OSError:
        return None


def machine(device: torch.device) -> dict:
    model = _first_line("/proc/cpuinfo", "model name")
    facts = {
        "cpu": model.split(":", 1)[1].strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": memory_bytes(torch.device("cpu")),
        "last_level_cache_bytes": cache_bytes(torch.device("cpu")),
        "transparent_hugepages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": platform.platform(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cache_bytes": properties.L2_cache_size,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "nvidia_smi": _output("nvidia-smi", f"--query-gpu={GPU_STATE}", "--format=csv"),
        }
    return facts


def versions() -> dict:
    found = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    try:
        import headroom

        found["headroom"] = getattr(headroom, "__version__", None)
        found["build_info"] = headroom.build_info()
    except (ImportError, AttributeError) as error:
        found["headroom"] = f"not importable: {error}"
    return found


def header(stem: str, device: torch.device, quick: bool) -> dict:
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "benchmark": stem,
        "device": device.type,
        "quick": quick,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # HEADROOM_COMMIT: for a copy of the sources without their history.
        "commit": _output("git", "rev-parse", "HEAD") or os.environ.get("HEADROOM_COMMIT"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "machine": machine(device),
        "versions": versions(),
    }


def save(path: pathlib.Path | None, results: dict) -> None:
    """Writes the results to a file, if one was asked for. Call it after each case: a run that is
    stopped keeps what it has."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def show_header(head: dict) -> None:
    facts, found = head["machine"], head["versions"]
    place = f"{facts['cpu']}, {facts['threads']} threads"
    if "gpu" in facts:
        place = facts["gpu"]["name"]
    print(
        f"{head['benchmark']} on {place}; torch {found['torch']}, headroom {found['headroom']}, "
        f"commit {(head['commit'] or 'unknown')[:12]}"
    )
    if head["quick"]:
        print("--quick: tiny sizes that show that everything runs. The numbers mean nothing.")


def show_limit(limit: dict) -> None:
    unit, scale = UNITS[limit["unit"]]
    print(f"\nmeasured limit, {unit}; the fastest is timed again in every round of each case")
    for name, result in limit["all"].items():
        mark = "  <- the limit" if name == limit["best"] else ""
        print(f"  {name:<44}{result['rate'] / scale:9.1f}{mark}")


def _bar(bar: dict, quick: bool) -> str:
    verdict = "" if quick else ", met" if bar["met"] else ", NOT MET"
    if "at_most" in bar:
        value = "nothing" if bar["value"] is None else f"{bar['value']:.3f}"
        return f"{value} <= {bar['at_most']:g} of {bar['of']}{verdict}"
    what = "" if bar["kind"] == "ratio" else " of limit"
    return f">= {bar['at_least']:g}{what}{verdict}"


def show_case(case: dict, quick: bool) -> None:
    unit, scale = UNITS[case["unit"]]
    print(f"\n{case['name']}: {case['what']}")
    over = f"x {case['subject']}"
    wide, names = max(11, len(over) + 2), max(18, *map(len, case["contenders"])) + 1
    print(
        f"  {'':<{names}}{'ms':>10}{'quartiles':>21}{unit:>9}{'of limit':>10}"
        f"{over:>{wide}}{'quartiles':>15}  bar"
    )
    for name, result in case["contenders"].items():
        if "seconds" not in result:
            print(f"  {name:<{names}}{result.get('error') or result.get('unavailable')}")
            continue
        q1, median, q3 = (result["seconds"][key] * 1e3 for key in ("q1", "median", "q3"))
        rate = f"{result['rate'] / scale:.1f}" if result["rate"] else "-"
        fraction = f"{result['fraction']:.2f}" if "fraction" in result else "-"
        ratio = result.get("ratio")
        line = f"  {name:<{names}}{median:10.3f}{f'{q1:.3f} - {q3:.3f}':>21}{rate:>9}{fraction:>10}"
        if ratio:
            spread = f"{ratio['q1']:.2f} - {ratio['q3']:.2f}" if name != case["subject"] else ""
            line += f"{ratio['median']:{wide}.2f}{spread:>15}"
        else:
            line += f"{'-':>{wide}}{'':>15}"
        timed = ("ratio", "fraction", "time")
        bars = [_bar(b, quick) for b in case["bars"] if b["row"] == name and b["kind"] in timed]
        print((line + "  " + "; ".join(bars)).rstrip(), flush=True)
    _show_counts(case, names, quick)


def _show_counts(case: dict, names: int, quick: bool) -> None:
    counted = {n: r["counts"] for n, r in case["contenders"].items() if "counts" in r}
    for kind in next(iter(counted.values()), ()):
        print(f"  {'':<{names}}{kind:>21}{'x ' + case['against']:>15}  bar")
        for name, counts in counted.items():
            share = (
                counts[kind] / counted[case["against"]][kind] if case["against"] in counted else 0
            )
            bars = [b for b in case["bars"] if b["row"] == name and b["kind"] == kind]
            line = f"  {name:<{names}}{counts[kind]:21,.0f}{share:15.3f}"
            print((line + "  " + "; ".join(_bar(b, quick) for b in bars)).rstrip(), flush=True)
