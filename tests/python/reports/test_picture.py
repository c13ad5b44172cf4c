"""The picture of a report has the numbers of its files, at the places where a reader looks."""

import json

import pytest
from headroom.reports import read

from helpers import report_files

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@pytest.fixture
def figure_of(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from headroom.reports import png

    def drawn(value):
        (tmp_path / "file.json").write_text(json.dumps(value))
        found = []
        monkeypatch.setattr(png, "save_png", lambda figure, path: found.append(figure))
        png.draw(read(tmp_path / "file.json"), "unused")
        found[0].canvas.draw()
        return found[0], found[0].axes[0]

    return drawn


def legend_of(axes):
    """The texts of the legend, which stands beside the axes, from their top."""
    legend = axes.get_legend()
    box, beside = legend.get_window_extent(), axes.get_window_extent()
    assert 0 <= box.x0 - beside.x1 <= 30 and abs(beside.y1 - box.y1) <= 30
    return [text.get_text() for text in legend.get_texts()]


def has_lines_only_across(axes, across, along):
    return across.get_gridlines()[0].get_visible() and not along.get_gridlines()[0].get_visible()


def test_memory_over_time(figure_of):
    plan = report_files.plan()
    figure, axes = figure_of(plan.to_json())
    unit = UNITS[axes.get_ylabel()]
    total = plan.timeline.bytes_over_events()
    top = axes.collections[-1].get_paths()[0].vertices
    assert top[:, 1].max() * unit == pytest.approx(max(total))
    assert axes.get_xlim() == (0, plan.timeline.events) and axes.get_ylim()[0] == 0
    assert list(axes.lines[0].get_xdata()) == [plan.timeline.peak_index] * 2
    assert all(area.get_linewidth() == 0 for area in axes.collections)  # else thin ones grow
    names = [area.get_label() for area in axes.collections]
    assert legend_of(axes) == names[::-1] and "optimizer state" in names
    assert has_lines_only_across(axes, axes.yaxis, axes.xaxis)
    assert list(figure.get_size_inches()) == [9.5, 3.4]


def test_bars_of_a_ladder(figure_of):
    ladder = report_files.ladder()
    figure, axes = figure_of(ladder)
    unit = UNITS[axes.get_xlabel()]
    for place, rung in enumerate(ladder["rungs"]):
        end = 0
        for bars in axes.containers:
            bar = bars.patches[place]
            assert bar.get_x() == pytest.approx(end)
            assert bar.get_width() * unit == pytest.approx(rung["bytes"][bars.get_label()])
            end += bar.get_width()
        for marks, name in zip(axes.collections, ("peak_bytes", "predicted_peak_bytes")):
            x, y = marks.get_offsets()[place]
            assert x * unit == pytest.approx(rung[name]) and y == place
    shown = [text.get_text() for text in axes.get_yticklabels()]
    assert shown == [rung["title"] for rung in ladder["rungs"]] and axes.yaxis_inverted()
    names = [bars.get_label() for bars in axes.containers]
    assert sorted(legend_of(axes)) == sorted([*names, "measured peak", "predicted peak"])
    assert has_lines_only_across(axes, axes.xaxis, axes.yaxis)
    assert list(figure.get_size_inches()) == [9.5, pytest.approx(1.4 + 4 * 0.3)]


def test_phases_of_the_steps_of_a_profile(figure_of):
    profile = report_files.profile()
    figure, axes = figure_of(profile)
    assert axes.get_ylabel() == "ms"
    for place, step in enumerate(profile["steps"]):
        end = 0
        for bars in axes.containers:
            bar = bars.patches[place]
            assert bar.get_x() + bar.get_width() / 2 == pytest.approx(place)
            assert bar.get_y() == pytest.approx(end)
            assert bar.get_height() * 1000 == pytest.approx(step["phases_us"][bars.get_label()])
            end += bar.get_height()
    assert legend_of(axes) == [bars.get_label() for bars in axes.containers][::-1]
    assert all(tick == int(tick) for tick in axes.get_xticks())  # there is no half of a step
    assert has_lines_only_across(axes, axes.yaxis, axes.xaxis)
    assert list(figure.get_size_inches()) == [9.5, 2.8]


def test_six_parts_are_drawn_at_most(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from headroom.reports import png

    report_files.plan(3).save(tmp_path / "file.json")
    found = []
    monkeypatch.setattr(png, "save_png", lambda figure, path: found.append((figure, path)))
    png.draw(read(tmp_path / "file.json") * 7, "where")
    ((figure, path),) = found
    assert len(figure.axes) == 6 and path == "where"
    assert list(figure.get_size_inches()) == [9.5, pytest.approx(6 * 3.4)]
