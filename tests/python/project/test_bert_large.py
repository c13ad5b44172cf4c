"""The ladder of transformers' guide: the twin's peaks are as planned, and the table is whole."""

import json

import pytest

import bert_large

pytest.importorskip("transformers")

SMALL = ["--layers", "2", "--twin", "1", "--width", "64", "--tokens", "16", "--steps", "1"]


@pytest.fixture
def rungs(monkeypatch):
    """The first of the guide, one with all of its techniques, and ours."""
    chosen = [bert_large.RUNGS[0], bert_large.RUNGS[8], bert_large.RUNGS[-1]]
    monkeypatch.setattr(bert_large, "RUNGS", chosen)
    return chosen


@pytest.mark.slow
def test_peaks_are_as_planned_and_the_table_has_every_rung(rungs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bert_large, "checks", lambda rows: {"rows": len(rows) == len(rungs)})
    assert bert_large.main([*SMALL, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    for rung, row, line in zip(rungs, rows, lines[2:]):
        assert row["twin_planned_mb"] == pytest.approx(row["twin_mb"], rel=0.01)
        assert row["twin_samples_per_second"] > 0 and row["gpu_mb"] > row["twin_mb"]
        assert line.startswith(f"| {rung.name} |") and line.count("|") == lines[0].count("|")


def test_what_must_hold():
    rows = [
        {"gpu_mb": size, "twin_planned_mb": 100.0, "twin_mb": 100.5}
        for size in (15, 9, 7, 14, 8, 13, 5, 13, 5, 2)
    ]
    assert all(bert_large.checks(rows).values())
    assert not all(bert_large.checks([*rows[:-1], rows[-1] | {"gpu_mb": 6}]).values())
    assert not all(bert_large.checks([rows[0] | {"twin_mb": 110}, *rows[1:]]).values())
    assert not all(bert_large.checks([rows[0], rows[1] | {"gpu_mb": 16}, *rows[2:]]).values())
