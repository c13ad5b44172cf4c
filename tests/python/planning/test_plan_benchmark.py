"""The benchmark of the planner, in its quick form: predictions against exact measurements."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import __main__ as command
from benchmarks import plan
from benchmarks._plan_cases import cases as all_cases

CPU = torch.device("cpu")


def test_cases_cover_what_is_promised():
    cases = all_cases()
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) >= 24
    for part in ("gpt", "llama", "bert", "resnet", "vit", "lora", "tied", "moe"):
        assert any(part in name for name in names), part
    assert len(plan.cases(CPU, quick=True)) <= 3


@pytest.mark.slow
def test_quick_run(tmp_path, capsys):
    """Three cases, each within the bar for the worst; --check fails above it."""
    path = tmp_path / "plan.json"
    chosen = [case.name for case in plan.cases(CPU, quick=True)]
    assert command.main(["plan", "--quick", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert [row["name"] for row in saved["cases"]] == chosen
    for row in saved["cases"]:
        assert f"\n{row['name']} " in printed
        assert sum(row["predicted_by_kind"].values()) == row["predicted"]
        assert sum(row["measured_by_kind"].values()) == row["measured"]
        assert abs(row["error"]) <= plan.WORST, row
    assert saved["summary"]["worst"] == max(abs(row["error"]) for row in saved["cases"])


def test_summary_of_errors():
    rows = [{"name": str(at), "error": error} for at, error in enumerate([0.01, -0.05, 0.0])]
    found = plan.summary([*rows, {"name": "broken", "failed": "why"}])
    assert found == {"cases": 3, "median": 0.01, "worst": 0.05, "worst_case": "1"}
    assert plan.summary([]) == {"cases": 0}


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_case_is_within_the_bar(case):
    for package in case.needs:
        pytest.importorskip(package)
    row = plan.compared(case, CPU)
    assert abs(row["error"]) <= plan.WORST, row
