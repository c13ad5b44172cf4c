"""Allocations add up to a timeline, which names the peak and its owners. Computed by hand."""

import json
import random

import pytest
from headroom.memory import KINDS, Allocation, Span, Timeline, format_bytes, parse_bytes
from headroom.memory.stream import Event, Label, Note, resolve


def _timeline():
    return Timeline(
        [
            Allocation(0, 100, 0, None, "parameters", "up", "weight"),
            Allocation(1, 40, 1, 6, "activations", "up", "aten::mm", "forward", 0, ("a.py:3 f",)),
            Allocation(2, 40, 2, 5, "activations", "up", "aten::mm", "forward", 0, ("a.py:3 f",)),
            Allocation(3, 70, 3, 4, "temporaries", "down", "aten::mm", "forward"),
            Allocation(4, 100, 6, 8, "gradients", "up", "weight", "backward"),
            Allocation(5, 5, 7, 8, "temporaries", None, "aten::add", "optimizer"),
        ],
        [Span(1, 0, "forward"), Span(4, 0, "backward"), Span(7, 0, "optimizer")],
    )


def test_live_bytes_peak_and_owners():
    timeline = _timeline()
    assert timeline.events == 9
    assert timeline.bytes_over_events() == [100, 140, 180, 250, 180, 140, 200, 205, 100]
    assert (timeline.peak_bytes, timeline.peak_index) == (250, 3)
    at_peak = {"parameters": 100, "activations": 80, "temporaries": 70}
    assert {kind: size for kind, size in timeline.peak_by_kind.items() if size} == at_peak
    assert sum(timeline.peak_by_kind.values()) == timeline.peak_bytes
    assert timeline.most_by_kind["gradients"] == 100
    assert timeline.by_module() == {
        "up": {"parameters": 100, "activations": 80},
        "down": {"temporaries": 70},
    }
    assert timeline.by_module(7)["-"] == {"temporaries": 5}
    first, second, *_ = timeline.owners()
    assert (first.kind, first.bytes, first.name) == ("parameters", 100, "up weight")
    assert (second.bytes, second.count, second.name) == (80, 2, "up mm at a.py:3 f")
    assert len(timeline.owners(top=1)) == 1


def test_a_phase_that_occurs_again_keeps_its_largest_peak():
    """As with micro-batches, of which the first may be the longest."""
    allocations = [Allocation(0, 70, 1, 2, "temporaries"), Allocation(1, 30, 5, 6, "temporaries")]
    names = ("forward", "backward", "forward", "backward")
    spans = [Span(start, 0, name) for start, name in zip((1, 3, 5, 7), names)]
    timeline = Timeline(allocations, spans)
    assert timeline.peaks_by_phase() == {"forward": 70, "backward": 0}
    assert timeline.peaks()[0, "forward"] == timeline.peaks_by_step()[0] == 70


def test_phases_and_steps():
    timeline = _timeline()
    assert timeline.peaks_by_phase() == {"forward": 250, "backward": 200, "optimizer": 205}
    assert timeline.peaks_by_step() == {0: 250}
    without = Timeline(timeline.allocations)  # known at the events that allocate
    assert without.peaks_by_phase()["forward"] == 250


def test_series_equal_a_sum_at_each_event():
    draw = random.Random(7)
    allocations = []
    for k in range(200):
        start = draw.randrange(300)
        end = None if draw.random() < 0.1 else start + draw.randrange(1, 50)
        kind = draw.choice(list(KINDS))
        allocations.append(Allocation(k, draw.randrange(1000), start, end, kind))
    timeline = Timeline(allocations)
    series = timeline.by_kind_over_events()
    for index in range(timeline.events):
        live = [a for a in allocations if a.is_live(index)]
        assert sum(a.bytes for a in live) == timeline.bytes_over_events()[index]
        for kind, sizes in series.items():
            assert sizes[index] == sum(a.bytes for a in live if a.kind == kind)


def test_table_fits_a_terminal():
    long = Allocation(9, 3 << 30, 2, 4, "optimizer_state", "blocks.0.attention." * 9, "exp_avg")
    timeline = Timeline([*_timeline().allocations, long], notes=["Not seen: oneDNN's buffers."])
    lines = timeline.table().splitlines()
    assert max(map(len, lines)) <= 80
    assert "Peak 3.00 GiB" in lines[0] and lines[-1] == "Not seen: oneDNN's buffers."
    assert "1 more" in timeline.table(top=3)
    assert Timeline([]).table().startswith("Peak 0 B")


def test_json_gives_the_same_timeline(tmp_path):
    timeline = _timeline()
    again = Timeline.from_json(json.loads(json.dumps(timeline.to_json())))
    assert again == timeline
    timeline.save(tmp_path / "run.json")
    assert Timeline.load(tmp_path / "run.json") == timeline
    with pytest.raises(ValueError, match="not a timeline: its format is 'other'"):
        Timeline.from_json({"format": "other"})


@pytest.mark.parametrize("field, value", [("kind", "params"), ("phase", "fwd")])
def test_names_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} is '{value}', wanted one of"):
        Allocation(0, 1, **{field: value})


@pytest.mark.parametrize(
    "text, size",
    [("2 GiB", 2 << 30), ("1.5GiB", 3 << 29), ("300 MB", 300_000_000), ("7", 7), (12, 12)],
)
def test_sizes_as_text(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["2 GiBs", "-1 GiB", "", "GiB", "nan", -3, float("inf")])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="wanted a number of bytes or text such as"):
        parse_bytes(text)
    with pytest.raises(TypeError, match="size is None"):
        parse_bytes(None)


def test_sizes_are_printed_in_binary_units():
    sizes = [0, 999, 1000, 1024, 734 << 20, 1023 << 20, 3 << 29, 70 << 40, -2048]
    wanted = ["0 B", "999 B", "0.98 KiB", "1.00 KiB", "734 MiB", "1.00 GiB", "1.50 GiB"]
    assert [format_bytes(size) for size in sizes] == [*wanted, "70.0 TiB", "-2.00 KiB"]


def test_events_and_notes_by_hand():
    notes = [
        Note(
            [Label(100, 10, "activations", None, None, ("a.py:1 f",))], phase="forward", module="up"
        ),
        Note([Label(100, 10, "gradients", "up", "weight")], phase="backward"),
        Note(freed=[(500, False), (100, False)], phase="optimizer"),
        Note(ends_step=True),
        Note(freed=[(100, True)], phase="forward"),
    ]
    events = [
        Event("alloc", 100, 10, "aten::mm"),
        Event("mark", 0),
        Event("alloc", 200, 20, "c10d::broadcast", stack=("b.py:2 g",)),
        Event("mark", 1),
        Event("alloc", 300, 30, "aten::mm", "down", "backward"),
        Event("mark", 2),
        Event("alloc", 400, 40),
        Event("free", 999, 9),
        Event("mark", 3),
        Event("alloc", 200, 50),
        Event("mark", 4),
        Event("alloc", 600, 60),
    ]
    found = resolve([Label(500, 5, "batch")], events, notes, "cuda:0", ["Seen."])
    # There are many of them.
    assert not any(hasattr(one, "__dict__") for one in (*found.allocations, *events, *notes))
    rows = [
        (a.bytes, a.kind, a.module, a.op, a.phase, a.step, a.start, a.end, a.stack)
        for a in found.allocations
    ]
    assert rows == [
        (5, "batch", None, None, "other", 0, 0, 5 - 1, ()),
        (10, "gradients", "up", "weight", "other", 0, 1, 8, ("a.py:1 f",)),
        (20, "communication", "up", "c10d::broadcast", "forward", 0, 2, 7, ("b.py:2 g",)),
        (30, "temporaries", "down", "aten::mm", "backward", 0, 3, None, ()),
        (40, "temporaries", None, None, "optimizer", 0, 5, None, ()),
        (50, "temporaries", None, None, "other", 0, 7, None, ()),
        (60, "temporaries", None, None, "forward", 1, 9, None, ()),
    ]
    assert found.notes == ["Seen."] and found.device == "cuda:0"
    assert [tuple(span) for span in found.spans] == [
        (0, 0, "other"), (2, 0, "forward"), (3, 0, "backward"), (5, 0, "optimizer"),
        (7, 0, "other"), (9, 1, "forward"),
    ]  # fmt: skip
