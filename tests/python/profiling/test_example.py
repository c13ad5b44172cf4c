"""The example: a script that is profiled with two lines."""

import json
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "profile_script.py"


def test_the_script_runs_and_is_short(tmp_path, monkeypatch, capsys):
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 40
    ours = [line for line in lines[12:] if "headroom" in line or "prof." in line]
    assert [line.split("(")[0].strip() for line in ours] == [
        "with headroom.profile",
        "prof.step",
        "print",
        "print",
    ]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path / "out")])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "forward" in printed and "aten::addmm" in printed and "(Sequential)" in printed
    result = json.loads((tmp_path / "out" / "rank0.0.profile.json").read_text())
    assert [step["number"] for step in result["steps"]] == [2, 3, 4]
    assert result["totals"]["loader_us"] > 0 and result["totals"]["mfu"] > 0
    assert result["trace"] in printed
