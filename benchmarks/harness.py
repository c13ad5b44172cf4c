"""Runs the cases of a stem and turns their timings into results.

A stem is a file such as `adamw.py` with a function `cases(device, quick)`. Adding a stem takes
nothing else: `python -m benchmarks` finds it.
"""

from __future__ import annotations

import gc
import pathlib
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from . import _report
from ._limits import Rotation, at_most_sets, filled, memory_bytes, product, sets_needed, streams
from ._timing import Contender, Settings, Timing, measure, ratios

__all__ = [
    "Bar",
    "Case",
    "Contender",
    "Rotation",
    "SameWork",
    "Settings",
    "Share",
    "Unavailable",
    "filled",
    "rows_of",
    "run",
    "sets_needed",
    "sized",
]


class Unavailable(Exception):
    """Raised by a factory if an optional peer is not installed. It is reported, not a failure."""


@dataclass
class Bar:
    """The result that a case aims at on one kind of device.

    kind "ratio": time of `against`, or else `Case.against`, over time of `Case.subject`; not judged
    where that peer is not installed.
    kind "fraction": rate of `Case.subject` over the measured limit.
    """

    kind: str
    at_least: float
    device: str
    against: str | None = None


def by_level(avx2: float, avx512: float) -> float:
    """Returns what to aim at with the instructions that torch uses here."""
    return avx512 if "AVX512" in torch.backends.cpu.get_cpu_capability() else avx2


@dataclass
class Share:
    """The result that one row aims at, beside another row of the case, on one kind of device.

    kind "time": the time of `row` over that of `of`, the median of the ratios within a round; or
    the name of something that their contenders count. Not judged where a row is not installed.
    """

    kind: str
    row: str
    of: str
    at_most: float
    device: str


@dataclass
class Case:
    """`setup(device)` allocates the data and returns contender factories by name.

    `work` is the least that one call has to do. With unit "byte", it counts bytes moved through
    memory, each input read once and each output written once. With unit "flop", it counts the
    floating-point operations, in `dtype`. None if neither limits the call, as with tiny tensors.
    """

    name: str
    what: str
    setup: Callable[[torch.device], dict[str, Callable[[], Contender]]]
    against: str
    work: int | None = None
    unit: str = "byte"
    dtype: torch.dtype = torch.float32
    bars: Sequence[Bar | Share] = ()
    subject: str = "headroom"


@dataclass
class SameWork:
    """Contenders that must do the same work. A test finds it where a stem has it as `SAME_WORK`: it
    calls each contender on data of its own from each of the `layouts`, and wants what `expected`
    gave in float64 before the call, within `tolerance`."""

    contenders: Sequence[Callable[[Rotation], Contender]]
    layouts: Sequence[Any]  # with allocate(device)
    expected: Callable[[Any], list[torch.Tensor]]
    left: Callable[[Any], list[torch.Tensor]]
    tolerance: float


def sized(largest: int, bytes_per_element: int, device: torch.device) -> int:
    """Returns `largest`, halved until so many elements take at most a quarter of the memory."""
    while largest * bytes_per_element > memory_bytes(device) // 4:
        largest //= 2
    return largest


def _summary(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "q1": q1, "median": median, "q3": q3, "max": max(values)}


def _result(timing: Timing) -> dict:
    return {
        "samples": len(timing.seconds),
        "calls_per_sample": timing.calls,
        "seconds": _summary(timing.seconds),
        "rate": timing.rate,
    }


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _limits(case: Case, device: torch.device, quick: bool) -> dict[str, Contender]:
    if case.unit == "byte":
        largest = 1 << 14 if quick else 1 << (28 if device.type == "cuda" else 25)
        return streams(sized(largest, 4 * 8, device), device)
    size = 128 if quick else 8192 if device.type == "cuda" else 2048
    return product(size, case.dtype, device)


def _share(bar: Share, contenders: dict, timings: dict[str, Timing]) -> float | None:
    if bar.kind == "time":
        if bar.row not in timings or bar.of not in timings:
            return None
        return statistics.median(ratios(timings[bar.row], timings[bar.of]))
    counts = [contenders[name].get("counts", {}).get(bar.kind) for name in (bar.row, bar.of)]
    return None if None in counts else counts[0] / counts[1]


def _bars(
    case: Case, device: torch.device, contenders: dict, timings: dict[str, Timing]
) -> list[dict]:
    found = []
    for bar in case.bars:
        if bar.device != device.type:
            continue
        if isinstance(bar, Share):
            if any("unavailable" in contenders[name] for name in (bar.row, bar.of)):
                continue
            value = _share(bar, contenders, timings)
            met = value is not None and value <= bar.at_most
            found.append({**vars(bar), "value": value, "met": met})
            continue
        row = (bar.against or case.against) if bar.kind == "ratio" else case.subject
        result = contenders.get(row, {})
        if "unavailable" in result:
            continue
        value = (
            result.get("ratio", {}).get("median") if bar.kind == "ratio" else result.get("fraction")
        )
        found.append(
            {
                "kind": bar.kind,
                "row": row,
                "at_least": bar.at_least,
                "value": value,
                "met": value is not None and value >= bar.at_least,
            }
        )
    return found


def run_case(
    case: Case, device: torch.device, settings: Settings, limit: tuple[str, Contender] | None = None
) -> dict:
    """Times one case. The limit, if given, takes part in every round as a contender does."""
    contenders: dict[str, Contender] = {}
    result: dict[str, dict] = {}
    for name, factory in case.setup(device).items():
        result[name] = {}  # holds the place in the table
        try:
            contenders[name] = factory()
            if contenders[name].work is None:
                contenders[name].work = case.work
            if contenders[name].prepare is not None:
                contenders[name].prepare()
            contenders[name].call()
        except Unavailable as reason:
            result[name] = {"unavailable": str(reason)}
            contenders.pop(name, None)
        except Exception as error:  # one contender's failure must not cost the other results
            result[name] = {"error": f"{type(error).__name__}: {error}"}
            contenders.pop(name, None)
    timed = dict(contenders)
    if limit is not None:
        timed["limit"] = limit[1]
    timings = measure(timed, device, settings)
    subject, ceiling = timings.get(case.subject), timings.get("limit")
    for name in contenders:
        result[name] = _result(timings[name])
        if ceiling is not None and timings[name].rate:
            result[name]["fraction"] = timings[name].rate / ceiling.rate
        if subject is not None:
            result[name]["ratio"] = _summary(ratios(timings[name], subject))
        if contenders[name].counts is not None:
            result[name]["counts"] = contenders[name].counts()
    return {
        "name": case.name,
        "what": case.what,
        "subject": case.subject,
        "against": case.against,
        "work": case.work,
        "unit": case.unit,
        "limit": {"name": limit[0], **_result(ceiling)} if ceiling is not None else None,
        "contenders": result,
        "bars": _bars(case, device, result, timings),
    }


def run(
    cases: Sequence[Case], device: torch.device, settings: Settings, quick: bool
) -> Iterator[tuple[str, dict]]:
    """Yields ("limit", result) before the first case that needs the limit, and ("case", result)."""
    limits: dict[str, tuple[str, Contender]] = {}
    with at_most_sets(2) if quick else nullcontext():
        for case in cases:
            limit = None
            if case.work is not None:
                kind = case.unit if case.unit == "byte" else f"{case.unit} {case.dtype}"
                if kind not in limits:
                    candidates = _limits(case, device, quick)
                    timings = measure(candidates, device, settings)
                    best = max(timings, key=lambda name: timings[name].rate)
                    limits[kind] = best, candidates[best]
                    measured = {name: _result(timing) for name, timing in timings.items()}
                    yield "limit", {"kind": kind, "unit": case.unit, "best": best, "all": measured}
                limit = limits[kind]
            yield "case", run_case(case, device, settings, limit)
            if not quick:
                _release(device)


def rows_of(
    chosen: Sequence[Any],
    row_of: Callable[[Any], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    result: Callable[[list[dict[str, Any]]], dict[str, Any]],
    path: pathlib.Path | None,
) -> list[dict[str, Any]]:
    """Returns a row for each case of a stem that compares something else than times. Each is shown
    when it is made, and `result` of all so far is saved. A case that fails has a row that says so,
    and does not cost the others."""
    rows: list[dict[str, Any]] = []
    for case in chosen:
        row = {"name": case.name, "what": case.what}
        try:
            row |= row_of(case)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        rows.append(row)
        show(row)
        gc.collect()
        _report.save(path, result(rows))
    return rows
