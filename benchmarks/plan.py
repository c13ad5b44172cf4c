"""How far the planner is off: predicted and measured peaks of small training steps.

On the CPU the measure is :func:`headroom.memory.track`, which is exact; on a GPU it is
``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from argparse import Namespace
from typing import Any

import torch

from . import _plan_ranks, _report
from ._plan_cases import Case
from ._plan_cases import cases as all_cases
from ._plan_steps import made, run_steps
from .harness import rows_of

BUCKET = 1 << 16  # bytes of gradients that are released at once
MEDIAN, WORST = 0.01, 0.04  # the bars, on the CPU


def cases(device: torch.device, quick: bool) -> list[Case]:
    found = [case for case in all_cases() if all(map(importlib.util.find_spec, case.needs))]
    if device.type == "cuda":  # one GPU
        found = [case for case in found if case.shard is None]
    return [case for case in found if case.quick] if quick else found


def predicted(case: Case, device: torch.device) -> Any:
    """Returns the plan."""
    import headroom

    model, optimizer, batch = made(case, device)
    return headroom.plan(
        model,
        optimizer,
        batch,
        forward=case.loss,
        device=device,
        amp=case.amp,
        accumulation=case.accumulation,
        release=BUCKET if case.release else False,
        world_size=None if case.shard is None else _plan_ranks.RANKS,
        shard=case.shard,
    )


def _prepared(case: Case, device: torch.device) -> tuple[Any, Any, Any]:
    model, optimizer, batch = made(case, device)
    if case.release:
        import headroom

        headroom.release_gradients(model, optimizer, bucket_bytes=BUCKET)
    return model, optimizer, batch


def measured(case: Case, device: torch.device) -> Any:
    """Returns the timeline of real steps. What libraries allocate once per process is allocated
    before."""
    import headroom.memory

    run_steps(case, *_prepared(case, device), device)
    gc.collect()
    model, optimizer, batch = _prepared(case, device)
    with headroom.memory.track(model, optimizer, batch=batch, stacks=False) as tracked:
        run_steps(case, model, optimizer, batch, device)
    return tracked.timeline


def on_gpu(case: Case, device: torch.device) -> dict[str, int]:
    """Returns the most bytes that torch allocated and reserved in real steps."""
    run_steps(case, *_prepared(case, device), device)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    model, optimizer, batch = _prepared(case, device)
    torch.cuda.reset_peak_memory_stats(device)
    run_steps(case, model, optimizer, batch, device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device) - before,
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def compared(case: Case, device: torch.device) -> dict[str, Any]:
    """Returns the row of a case: bytes, errors and seconds."""
    start = time.perf_counter()
    plan = predicted(case, device)
    row: dict[str, Any] = {"plan_seconds": time.perf_counter() - start}
    row["predicted"] = plan.peak_bytes
    row["predicted_by_kind"] = plan.peak_by_kind
    if case.shard is not None:
        row["ranks"] = _plan_ranks.RANKS
    if device.type == "cuda":
        got = on_gpu(case, device)
        row |= {"measured": got["allocated"], "measured_reserved": got["reserved"]}
        row["predicted"] = plan.allocated_bytes
        row["predicted_reserved"] = plan.reserved_bytes
        row["reserved_error"] = plan.reserved_bytes / got["reserved"] - 1
    else:
        if case.shard is None:
            real = measured(case, device)
        else:
            real = _plan_ranks.timeline(case, (1 + MEDIAN / 2) * plan.peak_bytes)
        row |= {"measured": real.peak_bytes, "measured_by_kind": real.peak_by_kind}
    row["error"] = row["predicted"] / row["measured"] - 1
    return row


def show(row: dict[str, Any]) -> None:
    head = f"{row['name']:<20}{row['what']:<28}"
    if "failed" in row:
        print(f"{head}{row['failed'][:200]}", flush=True)
        return
    sizes = f"{row['predicted'] / 2**20:10.2f}{row['measured'] / 2**20:10.2f}"
    line = f"{head}{sizes}{100 * row['error']:+8.2f} %"
    if "reserved_error" in row:
        sizes = f"{row['predicted_reserved'] / 2**20:9.0f}{row['measured_reserved'] / 2**20:9.0f}"
        line += f"{sizes}{100 * row['reserved_error']:+8.2f} %"
    print(line, flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median and the worst error."""
    errors = {row["name"]: abs(row["error"]) for row in rows if "error" in row}
    if not errors:
        return {"cases": 0}
    worst = max(errors, key=lambda name: errors[name])
    return {
        "cases": len(errors),
        "median": statistics.median(errors.values()),
        "worst": errors[worst],
        "worst_case": worst,
    }


def compare(options: Namespace, chosen: list[Case]) -> int:
    """Runs the cases and prints the table: what ``python -m benchmarks plan`` does."""
    device = torch.device(options.device)
    head = _report.header("plan", device, options.quick)
    _report.show_header(head)
    more = f"{'reserved':>20}{'error':>8}" if device.type == "cuda" else ""
    print(f"\n{'MiB':<48}{'predicted':>10}{'measured':>10}{'error':>8}{more}")
    rows = rows_of(
        chosen,
        lambda case: compared(case, device),
        show,
        lambda rows: {**head, "cases": rows, "summary": summary(rows)},
        options.json,
    )
    found = summary(rows)
    failed = [row["name"] for row in rows if "failed" in row]
    if failed:
        print(f"\ndid not run: {', '.join(failed)}")
    if not found["cases"]:
        return 1
    print(
        f"\n{found['cases']} cases: the median error is {100 * found['median']:.2f} %, the worst "
        f"{100 * found['worst']:.2f} % ({found['worst_case']})"
    )
    missed = found["median"] > MEDIAN or found["worst"] > WORST
    return 1 if failed or (options.check and missed) else 0
