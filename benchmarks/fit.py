"""Whether ``headroom.fit`` keeps budgets, predicts times, and is faster than torch's checkpoint.

A case NAME-40 is a budget at 40 % of the way from the least peak of a model to that of its fastest
choice; NAME-host-50 is one that needs the host, which has a budget, too; NAME-torch takes the peaks
of torch's checkpoint on every n-th block as budgets.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from . import _report
from ._fit_cases import Case, Training
from ._fit_cases import cases as all_cases
from ._fit_steps import (
    EVERY,
    OPTIMIZER,
    FitSteps,
    Times,
    TorchSteps,
    made,
    peak_of,
    ratios,
    timed,
)
from .harness import rows_of

FULL = 0.85  # of the budget, where it binds
MORE, FASTER = 1.1, 1.01  # it binds where a tenth more memory makes the step over 1 % faster
TIME_ERROR = 0.15  # the median over the cases
HOST_TIME_ERROR = 0.1  # of those that need the host
HOST_BUDGET = 8 << 30
PLANNING = 10  # steps
MOST_ROUNDS = 7


def cases(device: torch.device, quick: bool) -> list[Case]:
    if device.type != "cpu":
        sys.exit("the benchmark fit measures on the CPU, whose allocations are counted exactly")
    return [case for case in all_cases(quick) if all(map(importlib.util.find_spec, case.needs))]


class Models:
    """What is made once for all cases of a model."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._ladders: dict[tuple[str, int | None], Any] = {}
        self._plain: dict[str, TorchSteps] = {}

    def plain(self, training: Training) -> TorchSteps:
        """Returns the steps that a user has now, which are warm."""
        if training.name not in self._plain:
            run = self._plain[training.name] = TorchSteps(training)
            run.step()
        return self._plain[training.name]

    def ladder(self, training: Training, host_budget: int | None = None) -> Any:
        """Returns the whole frontier."""
        import headroom

        key = training.name, host_budget
        if key not in self._ladders:
            model, batch = made(training)
            self._ladders[key] = headroom.ladder(
                model, batch, optimizer=OPTIMIZER, loss=training.loss, host_budget=host_budget
            )
        return self._ladders[key]


def budget_row(case: Case, models: Models) -> dict[str, Any]:
    """Returns the bytes and seconds of a budget."""
    from headroom.host import default_arena, trim

    training, share = case.training, case.share
    assert share is not None
    points = models.ladder(training).points
    least, most = points[0].peak, points[-1].peak
    host_budget = HOST_BUDGET if case.host else None
    if case.host:
        least, most = models.ladder(training, host_budget).points[0].peak, least
    budget = round(least + share * (most - least))
    plain, run = models.plain(training), FitSteps(training, budget, host_budget)
    trim()
    default_arena().reset_peak()
    peak = peak_of(run)
    times = timed({"fit": run.step, "plain": plain.step}, models.rounds)
    seconds = times["fit"].described()
    return {
        "budget": budget,
        "least_peak": least,
        "fastest_peak": most,
        "predicted": run.fitted.predicted_peak,
        "measured": peak,
        "host_predicted": run.fitted.predicted_host,
        "host_measured": default_arena().peak,
        "used": peak / budget,
        **binding(run.fitted, budget),
        "choice": str(run.fitted.choice),
        "predicted_seconds": run.fitted.predicted_seconds,
        **seconds,
        "time_error": run.fitted.predicted_seconds / seconds["seconds"] - 1,
        "cpu_time_error": run.fitted.predicted_seconds / seconds["cpu_seconds"] - 1,
        "plain": times["plain"].described(),
        "planning": planning(run, times["plain"]),
    }


def binding(fitted: Any, budget: int) -> dict[str, Any]:
    """Returns whether the budget binds, by the frontier that ``fit`` saw."""
    within = [p.seconds for p in fitted.frontier if p.peak <= MORE * budget]
    faster = fitted.next_up
    return {
        "binds": fitted.predicted_seconds > FASTER * min(within, default=fitted.predicted_seconds),
        "next_faster_peak": None if faster is None else faster.peak,
        "next_faster_seconds": None if faster is None else faster.seconds,
    }


def planning(run: FitSteps, plain: Times) -> dict[str, float]:
    """Returns what it took to find the choice, in seconds and in steps as the user has them."""
    step = plain.described()
    return {
        "seconds": run.wall,
        "cpu_seconds": run.cpu,
        "steps": run.wall / step["seconds"],
        "cpu_steps": run.cpu / step["cpu_seconds"],
    }


def torch_row(case: Case, models: Models) -> dict[str, Any]:
    """Returns peaks and times of torch's checkpoint, and of ours with its peaks as budgets."""
    training = case.training
    models.plain(training)
    runs: dict[tuple[str, Any], TorchSteps | FitSteps] = {}
    points = []
    for every in EVERY:
        run = runs["torch", every] = TorchSteps(training, every)
        ours = runs["fit", every] = FitSteps(training, peak := peak_of(run))
        points.append({"every": every, "peak": peak, "ours_peak": peak_of(ours)})
    times = timed({name: run.step for name, run in runs.items()}, models.rounds)
    for point in points:
        every, peak = point["every"], point["peak"]
        within = [other["every"] for other in points if other["peak"] <= peak]
        best = min(within, key=lambda n: statistics.median(times["torch", n].wall))
        run = runs["fit", every]
        assert isinstance(run, FitSteps)
        point |= {
            "torch": times["torch", every].described(),
            "best_every": best,
            "ours": times["fit", every].described(),
            "ours_predicted": run.fitted.predicted_seconds,
            "choice": str(run.fitted.choice),
            **ratios(times["torch", best], times["fit", every]),
        }
    return {"points": points}


# The tables


def show(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"{row['name']:<12}{row['failed'][:200]}", flush=True)
    elif "points" in row:
        show_torch(row)
    else:
        sizes = f"{row['budget'] / 2**20:9.1f}{row['measured'] / 2**20:9.1f}"
        times = f"{1e3 * row['predicted_seconds']:9.0f}{1e3 * row['seconds']:9.0f}"
        steps = f"{row['planning']['steps']:7.1f}"
        print(
            f"{row['name']:<12}{sizes}{100 * row['used']:6.1f} %{times}"
            f"{100 * row['time_error']:+7.0f} %{steps}  {row['choice']}",
            flush=True,
        )


def show_torch(row: dict[str, Any]) -> None:
    print(f"\n{row['what']}\n{'every':<8}{'MiB':>9}{'torch ms':>10}{'best n':>8}", end="")
    print(f"{'our MiB':>9}{'our ms':>8}{'torch / ours':>14}{'of CPU time':>13}")
    for point in row["points"]:
        print(
            f"{point['every'] or 'none':<8}{point['peak'] / 2**20:9.1f}"
            f"{1e3 * point['torch']['seconds']:10.0f}{point['best_every'] or 'none':>8}"
            f"{point['ours_peak'] / 2**20:9.1f}{1e3 * point['ours']['seconds']:8.0f}"
            f"{point['ratio']:14.2f}{point['cpu_ratio']:13.2f}  {point['choice']}",
            flush=True,
        )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the bars, each with what was found and whether it is met."""
    with_host = [row for row in rows if row.get("host_predicted")]
    budgets = [row for row in rows if "used" in row]
    points = [point for row in rows for point in row.get("points", ())]
    found: dict[str, Any] = {"cases": len(budgets)}
    if budgets:
        errors = [abs(row["time_error"]) for row in budgets]
        steps = [row["planning"]["steps"] for row in budgets]
        used = [row["used"] for row in budgets]
        full = [row["used"] for row in budgets if row["binds"]]
        found |= {
            "most_used": _bar(max(used), most=1.0),
            "least_used_where_it_binds": _bar(min(full, default=1.0), least=FULL),
            "time_error": _bar(statistics.median(errors), most=TIME_ERROR),
            "planning_steps": _bar(max(steps), most=PLANNING),
        }
    if with_host:
        errors = [abs(row["time_error"]) for row in with_host]
        found["host_time_error"] = _bar(statistics.median(errors), most=HOST_TIME_ERROR)
        share = max(row["host_measured"] / HOST_BUDGET for row in with_host)
        found["most_of_the_host_budget"] = _bar(share, most=1.0)
    if points:
        over = [max(point["ours_peak"] / point["peak"] for point in points)]
        found["most_used_beside_torch"] = _bar(max(over), most=1.0)
        checkpointed = [point["ratio"] for point in points if point["every"] is not None]
        found["checkpoint_over_ours"] = _bar(min(checkpointed), least=1.0)
    return found


def _bar(value: float, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    if least is not None:
        return {"value": value, "at_least": least, "met": value >= least}
    return {"value": value, "at_most": most, "met": most is not None and value <= most}


def show_summary(found: dict[str, Any]) -> None:
    print(f"\n{found['cases']} budgets")
    for name, bar in found.items():
        if isinstance(bar, dict):
            sign, limit = ("<=", bar["at_most"]) if "at_most" in bar else (">=", bar["at_least"])
            verdict = "met" if bar["met"] else "NOT MET"
            print(f"  {name.replace('_', ' '):<24}{bar['value']:8.3f} {sign} {limit:g}, {verdict}")


def picture(row: dict[str, Any], ladder: Any, path: Path) -> None:
    """Draws what torch's checkpoint takes beside our frontier, both as measured."""
    from headroom.fitting.frontier_chart import Series, draw_frontier

    words = {None: "no checkpoint", 1: "every block"}
    torchs = [
        (p["peak"], p["torch"]["seconds"], words.get(p["every"], f"one in {p['every']}"))
        for p in row["points"]
    ]
    fits = [(p["ours_peak"], p["ours"]["seconds"], p["choice"]) for p in row["points"]]
    frontier = [(p.peak, p.seconds, "") for p in ladder.points]
    draw_frontier(
        path,
        f"{row['what']}: peak against time",
        [
            Series("headroom.fit at the same peaks, measured", fits),
            Series("torch.utils.checkpoint, measured", torchs),
            Series("headroom.ladder, predicted", frontier, is_frontier=True),
        ],
    )


def compare(options: Namespace, chosen: list[Case]) -> int:
    """Runs the cases and prints the tables: what ``python -m benchmarks fit`` does."""
    head = _report.header("fit", torch.device(options.device), options.quick)
    _report.show_header(head)
    print(f"\n{'':<12}{'budget':>9}{'peak MiB':>9}{'used':>8}{'said ms':>9}{'took ms':>9}", end="")
    print(f"{'error':>9}{'plan':>7}  (plan: steps that planning took)")
    start = time.monotonic()
    models = Models(min(options.rounds, 2 if options.quick else MOST_ROUNDS))

    def row_of(case: Case) -> dict[str, Any]:
        row = (torch_row if case.share is None else budget_row)(case, models)
        if options.json and "points" in row:
            path = options.json.with_name(f"{options.json.stem}-{case.training.name}.png")
            picture({"what": case.what, **row}, models.ladder(case.training), path)
        return row

    rows = rows_of(
        chosen,
        row_of,
        show,
        lambda rows: {**head, "cases": rows, "summary": summary(rows)},
        options.json,
    )
    found = summary(rows)
    show_summary(found)
    print(f"  {time.monotonic() - start:.0f} s in all")
    missed = [name for name, bar in found.items() if isinstance(bar, dict) and not bar["met"]]
    failed = [row["name"] for row in rows if "failed" in row]
    if failed:
        print(f"did not run: {', '.join(failed)}")
    return 1 if failed or (options.check and missed) else 0
