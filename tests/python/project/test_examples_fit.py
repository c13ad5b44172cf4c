"""The demo's rung that headroom.fit chooses: it is what fit applies, it keeps within its budget,
and the picture shows what there was to choose from."""

import itertools
import sys
from dataclasses import asdict, replace
from pathlib import Path

import headroom
import pytest
import torch
from headroom.fitting.choice import Choice

import chart
import choose
import data
import ladder
from frontier import stairs
from helpers.rung_reports import report as rung_report
from model import SIZES
from run import Run, predict
from rungs import RUNGS, STORY
from train import train

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CPU, TINY = torch.device("cpu"), SIZES["tiny"]
TEXT = str(EXAMPLES / "ladder.py")


def test_the_demo_has_the_rung():
    assert "fit" in STORY and RUNGS["fit"].budget == 0.5 and RUNGS["fit"].tolerance == 0.002


@pytest.mark.parametrize(
    "share, choice",
    [
        pytest.param(0.8, None, marks=pytest.mark.slow),
        (0.5, None),
        (0.41, None),
        (0.7, Choice(("L2", "L5"), optimizer="headroom", release=True)),
        (0.7, Choice(("L1", "L3"), optimizer="headroom", micro_batches=2)),
        (0.7, Choice(("L5", "L4"))),
    ],
)
def test_the_rung_is_what_fit_applies(share, choice, monkeypatch):
    """With the same choice, which is applied here, and taken over into a rung in the demo. Where
    measured times make it, it can be any; each technique is among those that are given."""
    fit, applied = headroom.fit, []

    def applying(*args, dry_run, ladder, **kwargs):
        assert dry_run
        given = {"ladder": ladder} if choice is None else {"choice": choice}
        applied.append(fit(*args, **given, **kwargs))
        return applied[0]

    monkeypatch.setattr(headroom, "fit", applying)
    text, _ = data.load(TEXT, TINY.context)
    rung = replace(RUNGS["fit"], budget=share)
    found = choose.choose(rung, TINY, CPU, text, 0)
    chosen = replace(rung, **found["changes"])
    assert found["budget_bytes"] == int(share * predict(RUNGS["torch"], TINY, CPU).peak_bytes)
    run, fitted = Run(chosen, TINY, CPU, 0), applied[0]
    assert asdict(chosen)["save"] == run.model.save == list(fitted.choice.levels)
    for step in range(3):
        pair = data.batch(text, 0, step, TINY.batch, TINY.context)
        assert torch.equal(run.train_on(run.micro_batches(text, step)), fitted.step(list(pair)))
    for one, other in zip(run.model.parameters(), fitted.model.parameters()):
        assert torch.equal(one, other)
    assert found["predicted_peak_bytes"] == fitted.predicted_peak
    assert found["predicted_peak_bytes"] == predict(chosen, TINY, CPU).peak_bytes
    measured = run.count_bytes(text).peak_bytes
    assert abs(found["predicted_peak_bytes"] / measured - 1) < ladder.PREDICTION_ERROR
    assert measured <= found["budget_bytes"]
    peaks, seconds, _ = zip(*found["frontier"])
    assert list(peaks) == sorted(peaks) and list(seconds) == sorted(seconds, reverse=True)


@pytest.mark.parametrize("bucket", [0, 1 << 14])
def test_gradients_wait_in_a_bucket_as_predicted(bucket):
    text, _ = data.load(TEXT, TINY.context)
    rung = replace(RUNGS["fit"], optimizer="headroom.optim.AdamW", release=True, save=["L5", "L1"])
    rung = replace(rung, bucket_bytes=bucket)
    run = Run(rung, TINY, CPU, 0)
    run.step(text)
    measured, predicted = run.count_bytes(text), predict(rung, TINY, CPU)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    weights = sum(p.nbytes for p in run.model.parameters())
    most = measured.most_by_kind["gradients"]
    assert most < weights / 2


@pytest.mark.slow
def test_a_run_of_another_budget_or_size_is_refused(tmp_path):
    """Before anything is made of what was chosen for it."""
    train(RUNGS["fit"], tmp_path, size="tiny", path=TEXT, steps=1)
    for rung, size, named in (
        (replace(RUNGS["fit"], budget=0.6), "tiny", "budget"),
        (RUNGS["fit"], "small", "size"),
    ):
        with pytest.raises(ValueError, match=f"is of another run: it differs in {named}"):
            train(rung, tmp_path, size=size, path=TEXT, steps=2, resume=True)


def report(key, peak, seconds, **others):
    """Of a rung that took so many MiB, all of them activations, and so many seconds a step."""
    most = peak << 20
    peaks = dict.fromkeys(("peak_bytes", "predicted_peak_bytes", "process_peak_bytes"), most)
    kinds = dict.fromkeys(headroom.memory.KINDS, 0) | {"activations": most}
    same = {"tolerance": RUNGS[key].tolerance, "step_seconds": seconds, "bytes": kinds}
    return rung_report(key, 2.0, **(same | peaks | others))


FOUND = {
    "budget_bytes": 50 << 20,
    "predicted_peak_bytes": 48 << 20,
    "seconds": 7.0,
    "choice": "all L2",
    "changes": {},
    "frontier": [[30 << 20, 0.9, "a"], [48 << 20, 0.6, "all L2"], [70 << 20, 0.5, "c"]],
}


@pytest.mark.parametrize("peak", [50, 51])
def test_ladder_fails_above_a_budget(peak, tmp_path, monkeypatch, capsys):
    made = {"torch": report("torch", 100, 0.5), "fit": report("fit", peak, 0.6, fit=FOUND)}
    monkeypatch.setattr(ladder, "run_rung", lambda rung, args: made[rung.key])
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--out", str(tmp_path), "--rungs", "torch,fit"])
    assert ladder.main() == (peak == 51)
    verdict = f"fit (all L2) takes {peak}.0 of 50.0 MiB, chosen in 7 s."
    out = capsys.readouterr().out
    assert f"{'PASSED: a peak within the' if peak == 50 else 'ABOVE THE'}" in out
    assert verdict in out
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_frontier(tmp_path, monkeypatch):
    """Beside the rungs of its size, whose keys stand apart from one another and from the lines."""
    figures, close = [], chart.plt.close
    monkeypatch.setattr(chart.plt, "close", figures.append)
    results = [
        report("torch", 100, 0.55),
        report("L1", 66, 0.56),
        report("L2", 64, 0.57),
        report("L5", 47, 0.61),
        report("everything", 10, 0.95),
        report("checkpoint", 30, 0.96),
        report("fit", 48, 0.62, fit=FOUND),
        report("words", 300, 0.2, size="words-tiny"),
    ]
    chart.draw(results, tmp_path / "chart.png")
    chart.draw(results[:6], tmp_path / "chart.png")
    assert [len(figure.axes) for figure in figures] == [3, 1]
    axes = figures[0].axes[2]
    texts = {text.get_text(): text for text in axes.texts}
    assert texts.keys() == {result["key"] for result in results[:7]}
    stair, budget = axes.lines
    assert list(stair.get_xdata()) == [30, 48, 70]
    assert list(stair.get_ydata()) == pytest.approx([900, 600, 500])
    assert set(budget.get_xdata()) == {50}
    marks = [mark for points in axes.collections for mark in points.get_offsets().tolist()]
    wanted = [[r["peak_bytes"] / 2**20, 1e3 * r["step_seconds"]] for r in results[:7]]
    assert sorted(marks) == sorted(wanted)
    for (x, y), edge in itertools.product(marks, [(axes.get_xlim()[1], axes.get_ylim()[1])]):
        assert 0 < x < edge[0] and 0 < y < edge[1]
    boxes = [text.get_window_extent() for text in texts.values()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    places = axes.transData.transform(marks)
    assert not any(box.contains(*place) for box in boxes for place in places)
    line = axes.transData.transform((50, 0))[0]
    assert not any(box.x0 < line < box.x1 for box in boxes)
    for figure in figures:
        close(figure)


def test_stairs_have_a_level_and_an_upright_line_for_each_step():
    lines = stairs([(1, 9), (3, 6), (4, 2)])
    assert set(lines) == {((1, 9), (3, 9)), ((3, 9), (3, 6)), ((3, 6), (4, 6)), ((4, 6), (4, 2))}
