"""The demo's verdicts, table and chart of results that were made up."""

import json
import math
import re
import sys
from pathlib import Path
from statistics import mean

import pytest

import chart
import convergence
import ladder
from helpers.rung_reports import report
from rungs import RUNGS, chosen


def test_a_rung_is_titled_with_what_is_left_out_before_it():
    titles = {rung.key: rung.title for rung in chosen(["torch", "L0", "L5", "everything", "fp16"])}
    assert titles["torch"] == RUNGS["torch"].title
    assert titles["L0"] == "+ Headroom's AdamW, its blocks"
    assert titles["everything"] == "+ 8-bit moments, bf16 weights, micro-batches"
    assert titles["fp16"] == RUNGS["fp16"].title
    assert chosen(list(RUNGS)) == list(RUNGS.values())


@pytest.mark.parametrize("loss", [2.02, 1.98, float("nan"), float("inf")])
def test_ladder_fails_when_a_rung_reaches_another_loss(loss, tmp_path, monkeypatch, capsys):
    losses = {"torch": 2.0, "headroom": 2.005, "8bit": loss}
    monkeypatch.setattr(ladder, "run_rung", lambda rung, args: report(rung.key, losses[rung.key]))
    argv = ["ladder.py", "--out", str(tmp_path), "--rungs"]
    monkeypatch.setattr(sys, "argv", [*argv, "torch,headroom"])
    assert ladder.main() == 0
    assert "PASSED" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*argv, "torch,headroom,8bit"])
    assert ladder.main() == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and out.count("OTHER LOSS") == 1


def test_ladder_fails_when_the_first_rung_diverged():
    assert not ladder.same_loss([report("torch", float("nan"))])[0]


def test_a_rung_is_compared_with_the_first_of_its_size():
    """The second of two words rungs reaches the loss of the first, far from that of bytes."""
    sized = {"size": "words-tiny", "vocab": 600}
    results = [
        report("torch", 5.0),
        report("L5", 5.0, peak_bytes=4 << 20),
        report("words", 3.0, peak_bytes=20 << 20, **sized),
        report("words-loss", 3.005, peak_bytes=5 << 20, **sized),
    ]
    passed, verdict = ladder.same_loss(results)
    assert passed and "torch, 5.0000 bits per byte, and of words, 3.0000" in verdict
    for bad, loss in ((2, math.nan), (3, 3.02), (3, 5.0)):
        changed = [dict(result) for result in results]
        changed[bad]["held_out_bits_per_byte"] = loss
        assert not ladder.same_loss(changed)[0]
    assert chart.shares(results) == [1, 0.4, 1, 0.25]
    assert ladder.least_peaks(results) == "torch 10 MiB -> 4 MiB; words 20 MiB -> 5 MiB"
    assert chart.shares(results[3:]) == [1]


def test_the_chart_has_a_panel_for_each_size(tmp_path, monkeypatch):
    figures, close = [], chart.plt.close
    monkeypatch.setattr(chart.plt, "close", figures.append)
    sized = {"size": "words-tiny", "vocab": 600}
    results = [report("torch", 5.0), report("L5", 5.0, peak_bytes=4 << 20)]
    results += [report("words", 3.0, peak_bytes=40 << 20, **sized)]
    for some in (results, results[:2], results[2:]):
        chart.draw(some, tmp_path / "chart.png")
    wide = [[axes.get_xlim()[1] for axes in figure.axes] for figure in figures]
    assert wide == [pytest.approx([10.4, 41.6]), [pytest.approx(10.4)], [pytest.approx(41.6)]]
    texts = [[text.get_text() for text in axes.texts] for axes in figures[0].axes]
    assert texts[0].count("100%") == 1 and "40%" in texts[0] and "100%" in texts[1]
    assert any("2 steps of 4 x 32 words (vocabulary: 600)" in text for text in texts[1])
    top = [text.get_text() for text in figures[2].texts]
    assert any("words (vocabulary: 600)" in text for text in top)
    for figure in figures:
        close(figure)


def test_ladder_fails_where_levels_differ_in_a_bit():
    exact = [report("torch", 2.0), report("L1", 2.0), report("L5", 2.0, gradients_of_L0=True)]
    passed, verdict = ladder.same_loss(exact)
    assert passed and "same bits as L1, the gradients of L0" in verdict
    for change in (
        {"losses": [8.0, 7.000001]},
        {"held_out_bits_per_byte": 2.000001},
        {"gradients_of_L0": False},
    ):
        passed, verdict = ladder.same_loss([*exact[:2], exact[2] | change])
        assert not passed and ("OTHER BITS" in verdict or "NOT the gradients of L0" in verdict)


@pytest.mark.parametrize("predicted", [10.4, 9.6, 10.6, 9.4])
def test_ladder_fails_when_a_peak_is_not_as_predicted(predicted, tmp_path, monkeypatch, capsys):
    made = {"torch": {}, "headroom": {"predicted_peak_bytes": int(predicted * 2**20)}}
    monkeypatch.setattr(
        ladder, "run_rung", lambda rung, args: report(rung.key, 2.0, **made[rung.key])
    )
    monkeypatch.setattr(
        sys, "argv", ["ladder.py", "--out", str(tmp_path), "--rungs", ",".join(made)]
    )
    wrong = predicted in (10.6, 9.4)
    assert ladder.main() == (1 if wrong else 0)
    out = capsys.readouterr().out
    assert ("OTHER PEAK THAN PREDICTED: headroom" in out) == wrong
    assert ("2 peaks are as predicted" in out) == (not wrong)


def test_table_holds_the_numbers():
    rows = ladder.table([report("torch", 2.0), report("a longer title", 1.5)]).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len({len(row) for row in rows}) == 1  # aligned
    assert cells[0][:3] == ["rung", "time s", "held-out bits/byte"]
    numbers = [
        "3",
        "2.0000",
        "1,234",
        "16.04",
        "10.0",
        "10.0",
        "1.0",
        "2.0",
        "3.0",
        "4.0",
        "0.0",
        "12.0",
    ]
    assert cells[2][1:] == numbers
    assert cells[3][0] == "a longer title"


@pytest.mark.parametrize("fails", [None, "bf16, Kahan", convergence.NEAREST])
def test_convergence_judges_every_mode_and_goes_on(fails, monkeypatch, tmp_path, capsys):
    """Modes that should fail diverge, those that should not are exact; one may do the opposite."""
    out, calls = tmp_path / "table.json", []

    def held_out(setting, rung, seed, steps, path):
        mode = next(m for m, r in setting.modes.items() if r is rung)
        assert (steps, path) == (2, None)
        calls.append(seed)
        return math.inf if (mode in setting.worse) != (mode == fails) else 2.0 + seed

    modes = sum(len(setting.modes) for setting in convergence.SETTINGS.values())
    for seeds in (1, 3):
        arguments = ["--steps", "2", "--seeds", str(seeds), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["convergence.py", *arguments])
        with pytest.raises(SystemExit) as exit:
            convergence.compare(None, convergence.SETTINGS, 150, held_out)
        assert exit.value.code == (fails is not None)
    assert sorted(calls) == [0] * modes + [1] * modes + [2] * modes  # none twice
    table = json.loads(out.read_text())["bits_per_byte"]
    assert table["heavy-tailed"]["AdamW8bit"] == [2.0, 3.0, 4.0]
    assert table["heavy-tailed"]["8-bit, code 0 allowed"] == [None] * 3
    text = capsys.readouterr().out
    assert "seeds of the first differ by 2.000" in text
    assert ("NOT CLOSE" in text or "NOT VISIBLY WORSE" in text) == (fails is not None)


def test_the_page_has_the_means_that_were_measured():
    """Of every mode of every setting, and no other figures of three decimals."""
    root = Path(__file__).resolve().parents[3]
    means = set()
    for name in ("convergence-cpu", "convergence-adapters-cpu"):
        results = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text())
        modes = results["bits_per_byte"]
        if name == "convergence-cpu":
            judged = {s: [*setting.modes] for s, setting in convergence.SETTINGS.items()}
            assert {s: sorted(modes[s]) for s in modes} == {s: sorted(judged[s]) for s in judged}
        rows = [row for setting in modes.values() for row in setting.values()]
        means |= {f"{mean(row):.3f}" for row in rows if None not in row}
    page = (root / "docs" / "convergence.md").read_text()
    assert {*re.findall(r"(?<!differs by )\b\d\.\d{3}\b", page)} == means


@pytest.mark.parametrize("held", [5, 6])
def test_other_bytes_on_the_host_than_predicted_fail(held):
    results = [report("torch", 2.0), report("host", 2.0, host_bytes=held, predicted_host_bytes=5)]
    passed, verdict = ladder.as_predicted(results)
    assert passed == (held == 5)
    assert ("OTHER BYTES ON THE HOST THAN PREDICTED: host" in verdict) == (held == 6)
