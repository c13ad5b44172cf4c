"""The benchmark of headroom.fit: its cases, torch's checkpoint, its bars, and a quick run."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import __main__ as command
from benchmarks import fit
from benchmarks._fit_cases import cases as all_cases
from benchmarks._fit_cases import trainings
from benchmarks._fit_steps import TorchSteps, peak_of

CPU = torch.device("cpu")


def test_cases_cover_what_is_promised():
    cases = all_cases(quick=False)
    names = [case.name for case in cases]
    budgets = [case for case in cases if case.share is not None]
    assert len(names) == len(set(names)) and len(budgets) > 20
    assert {"gpt", "llama", "ours", "gpt2", "bert", "mixer"} == {c.training.name for c in budgets}
    assert [case.name for case in cases if case.share is None] == ["gpt-torch", "llama-torch"]


def mixer():
    return next(one for one in trainings(quick=True) if one.name == "mixer")


def test_checkpointing_takes_less_and_trains_alike():
    """Of three blocks all, or the first and the last: the same weights after the steps."""
    runs = {every: TorchSteps(mixer(), every) for every in (None, 2, 1)}
    runs[None].step()  # what libraries allocate once
    runs[None] = TorchSteps(mixer())
    peaks = {every: peak_of(run) for every, run in runs.items()}
    assert peaks[1] < peaks[2] < peaks[None]
    weights = {every: [*run.model.parameters()] for every, run in runs.items()}
    for every in (2, 1):
        for got, wanted in zip(weights[every], weights[None], strict=True):
            torch.testing.assert_close(got, wanted)


def row(used, error, steps, binds=True):
    return {"used": used, "binds": binds, "time_error": error, "planning": {"steps": steps}}


def test_bars():
    point = {"every": 2, "peak": 100, "ours_peak": 99, "ratio": 1.2}
    plain = point | {"every": None, "ratio": 0.9}  # has no checkpoint, and counts for no bar
    rows = [row(0.99, -0.1, 3), row(0.86, 0.2, 10), row(0.9, 0.14, 2), row(0.5, 0.1, 1, False)]
    points = {"points": [point, point | {"ratio": 1.01}, plain]}
    found = fit.summary([*rows, {"failed": "why"}, points])
    assert found["cases"] == 4 and abs(found["time_error"]["value"] - 0.12) < 1e-9
    assert all(bar["met"] for bar in found.values() if isinstance(bar, dict))
    rows = [row(1.001, 0.2, 11), row(0.84, 0.2, 1)]
    found = fit.summary([*rows, {"points": [point | {"ours_peak": 101, "ratio": 0.99}]}])
    assert not any(bar["met"] for bar in found.values() if isinstance(bar, dict))
    assert fit.summary([]) == {"cases": 0}


def test_budget_binds_where_a_tenth_more_is_faster():
    def fitted(*points, seconds=1.0):
        frontier = [SimpleNamespace(peak=peak, seconds=s) for peak, s in points]
        faster = [point for point in frontier if point.seconds < seconds]
        return SimpleNamespace(
            predicted_seconds=seconds, frontier=frontier, next_up=faster[0] if faster else None
        )

    assert fit.binding(fitted((90, 1.0), (109, 0.98)), 100)["binds"]
    assert not fit.binding(fitted((90, 1.0), (109, 0.995)), 100)["binds"]
    assert not fit.binding(fitted((90, 1.0), (111, 0.5)), 100)["binds"]
    assert fit.binding(fitted((90, 1.0), (111, 0.5)), 100)["next_faster_peak"] == 111
    assert not fit.binding(fitted((90, 1.0)), 100)["binds"]


@pytest.mark.slow
def test_quick_run(tmp_path, capsys):
    """Of a budget and a frontier beside torch: no peak is above its budget."""
    path = tmp_path / "fit.json"
    names = ["mixer-40", "gpt-torch"]
    line = ["fit", "--quick", "--rounds", "2", "--json", str(path), "--cases", *names]
    assert command.main(line) == 0
    printed = capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert {row["name"] for row in saved["cases"]} == set(names)
    assert names[0] in printed
    assert saved["summary"]["cases"] == 1 and saved["summary"]["most_used"]["met"]
    assert saved["summary"]["most_used_beside_torch"]["met"]
    assert (tmp_path / "fit-gpt.png").read_bytes().startswith(b"\x89PNG")
