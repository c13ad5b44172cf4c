"""Pictures: which points of a frontier get labels, units, and files that are whole."""

from dataclasses import dataclass

import pytest
from headroom._core.drawing import byte_unit, new_figure, plain_axes, safe_text, save_png
from headroom.fitting.frontier_chart import Series, draw_frontier, label_points, telling

GIB, MIB = 1 << 30, 1 << 20


@dataclass
class Point:
    peak: int
    seconds: float


def test_units_of_bytes():
    assert byte_unit(GIB) == (GIB, "GiB") and byte_unit(GIB - 1) == (MIB, "MiB")
    assert byte_unit(MIB) == (MIB, "MiB") and byte_unit(1024) == (1024, "KiB")
    assert byte_unit(1023) == byte_unit(1) == byte_unit(0) == (1, "B")


def test_points_that_tell_most():
    """Both ends, the corner, and then the one that is next furthest from the lines between them."""
    corner = [
        Point(0, 10.0),
        Point(1, 2.0),
        Point(2, 1.8),
        Point(6, 1.4),
        Point(8, 0.4),
        Point(10, 0.0),
    ]
    assert telling(corner, 6) == telling(corner, 7) == corner
    assert telling(corner, 2) == [corner[0], corner[-1]]
    assert telling(corner, 3) == [corner[n] for n in (0, 1, 5)]
    assert telling(corner, 4) == [corner[n] for n in (0, 1, 3, 5)]
    assert telling(corner, 5) == [corner[n] for n in (0, 1, 3, 4, 5)]
    flat = [Point(5, 1.0)] * 4  # no height and no width
    assert telling(flat, 3) == flat[:3]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws, and returns the axes, whose file is written too."""
    pytest.importorskip("matplotlib")
    from headroom._core import drawing

    def draw(title, series):
        figures = []

        def kept(*size):
            figures.append(new_figure(*size))
            return figures[-1]

        monkeypatch.setattr(drawing, "new_figure", kept)
        draw_frontier(tmp_path / "frontier.png", title, series)
        assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
        return figures[-1].axes[0]

    return draw


def test_a_picture_of_two_series(drawn):
    points = [(2 * GIB, 0.5, "large"), (GIB, 1.0, "cost $1"), (GIB // 2, 1.5, "")]
    axes = drawn("peak for $", [Series("found", points, True), Series("by hand", [(GIB, 2.0, "")])])
    stairs, first, second = axes.lines[0], *axes.collections
    assert list(stairs.get_xdata()) == [0.5, 1, 2]
    assert list(stairs.get_ydata()) == [1500, 1000, 500]
    assert stairs.get_drawstyle() == "steps-post" and len(axes.lines) == 1
    assert first.get_offsets().tolist() == [[0.5, 1500], [1, 1000], [2, 500]]
    assert second.get_offsets().tolist() == [[1, 2000]]
    assert axes.get_xlabel().startswith("GiB at the peak") and "milliseconds" in axes.get_ylabel()
    assert axes.get_xlim() == (0, pytest.approx(2.12)) and axes.get_ylim() == (
        0,
        pytest.approx(2120),
    )
    assert axes.get_title(loc="left") == r"peak for \$"
    assert {t.get_text() for t in axes.get_legend().get_texts()} == {"found", "by hand"}
    assert {t.get_text() for t in axes.texts} == {"large", r"cost \$1"}
    assert not any(spine.get_visible() for spine in axes.spines.values())


def test_seconds_and_a_scale_that_does_not_begin_at_0(drawn):
    axes = drawn("slow", [Series("one", [(600, 10.0, ""), (900, 18.0, "")])])
    assert axes.get_ylabel() == "seconds of a step" and axes.get_xlabel().startswith("B at")
    assert axes.get_ylim() == (9.0, pytest.approx(1.06 * 18)) and axes.get_legend() is None
    assert drawn("half", [Series("one", [(1, 9.0, ""), (1, 18.0, "")])]).get_ylim()[0] == 8.1


def test_labels_cover_nothing(drawn):
    """Of eight points in one place one label or two find room; far away each does."""
    near = [(GIB + 1000 * k, 1.0, f"label {k}") for k in range(12)]
    labels = drawn("near", [Series("one", near)]).texts
    assert 1 < len(labels) <= 8
    boxes = [label.get_window_extent() for label in labels]
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
    far = [(k * GIB, 2.0 + k % 2, f"label {k}") for k in range(1, 5)]
    assert len(drawn("far", [Series("one", far)]).texts) == 4


def test_labels_keep_off_lines():
    pytest.importorskip("matplotlib")
    figure = new_figure(4, 3)
    axes = figure.subplots()
    plain_axes(axes, "lines")
    axes.set_xlim(0, 2)
    axes.set_ylim(0, 2)
    figure.draw_without_rendering()
    label_points(figure, axes, [(1, 1, "one", "black")])
    (free,) = axes.texts
    box = free.get_window_extent()
    y = axes.transData.inverted().transform((box.x0, (box.y0 + box.y1) / 2))[1]
    free.remove()
    label_points(figure, axes, [(1, 1, "one", "black")], [((1, y), (2, y))])
    (moved,) = axes.texts
    assert not moved.get_window_extent().overlaps(box)


def test_no_point_and_no_file(tmp_path):
    with pytest.raises(ValueError, match="there is no point to draw"):
        draw_frontier(tmp_path / "a.png", "", [Series("none", [])])
    pytest.importorskip("matplotlib")
    with pytest.raises(OSError, match="[Dd]irectory"):
        save_png(new_figure(1, 1), tmp_path)
    first, second = tmp_path / "1.png", tmp_path / "2.png"
    for path in (first, second):
        save_png(new_figure(1, 2), path)
    assert first.read_bytes() == second.read_bytes()
    assert int.from_bytes(first.read_bytes()[16:20], "big") == 120
    assert b"Software" not in first.read_bytes() and safe_text("a$b$") == r"a\$b\$"
