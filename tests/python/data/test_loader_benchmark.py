"""The benchmark of advice on loaders, in its quick form."""

import json
import os
import sys
from pathlib import Path

import torch
from headroom.data import trials

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import loader  # noqa: E402


def test_every_setting_of_the_grid_is_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trials, "SECONDS", trials.SECONDS)
    path, cpus = tmp_path / "loader.json", os.sched_getaffinity(0)
    chosen = ["already fast", "one processor"]
    line = ["loader", "--quick", "--cases", *chosen, "--json", str(path)]
    assert command.main(line) == 0
    rows = json.loads(path.read_text())["cases"]
    printed = capsys.readouterr().out
    assert [row["name"] for row in rows] == chosen
    for row in rows:
        assert len(row["seconds"]) >= 3 and row["advised"] in row["seconds"]
        assert row["ratio"] >= 1 and row["met"] == (row["ratio"] <= loader.AT_MOST)
        assert f"\n{row['name']}: " in printed
    assert os.sched_getaffinity(0) == cpus


def test_there_are_six_loaders_whose_batches_are_what_they_say():
    cases = loader.cases(torch.device("cpu"), quick=True)
    assert len(cases) == 6 and sum(case.one_cpu for case in cases) == 1
    sizes = {case.name: next(iter(case.make())).nbytes for case in cases}
    assert sizes["large batches"] == 64 * 150_528 * 4 and sizes["many small files"] == 32 * 4096
