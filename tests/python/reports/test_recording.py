"""Numbers of a report beside those that are counted one allocation after the other."""

import json
import time
from itertools import accumulate

import pytest
from headroom.memory import Allocation, Span, Timeline
from headroom.memory.events import KINDS
from headroom.reports import read, recording

from helpers import report_files


def walked(timeline, index):
    """The live bytes by kind at an event."""
    found = {}
    for a in timeline.allocations:
        if a.start <= index and (a.end is None or index < a.end):
            found[a.kind] = found.get(a.kind, 0) + a.bytes
    return found


@pytest.mark.parametrize("points", [7, 100, 6000])
def test_series_at_every_point(monkeypatch, points):
    monkeypatch.setattr(recording, "POINTS", points)
    timeline = report_files.timeline(230)
    content = recording.described(timeline)
    at = list(accumulate(content["points"]))
    assert len(at) == min(points, timeline.events) and at == sorted(set(at))
    assert timeline.peak_index in at
    for group in ("kind", "module", "line"):
        rows = {name: list(accumulate(row)) for name, row in content["series"][group].items()}
        for place, event in enumerate(at):
            here = walked(timeline, event)
            assert sum(row[place] for row in rows.values()) == sum(here.values()), group
            if group == "kind":
                assert {kind: row[place] for kind, row in rows.items() if row[place]} == here
    # A point shows the fullest of the events until the next one's range.
    total = timeline.bytes_over_events()
    edges = [place * timeline.events // len(at) for place in range(len(at) + 1)]
    for event, begin, end in zip(at, edges, edges[1:]):
        assert abs(total[event] - max(total[begin : end + 1])) <= max(total) / 2
        assert begin - 1 <= event <= end


@pytest.mark.parametrize("cells", [1, 12_000_000])
def test_largest_owners_at_every_point(monkeypatch, cells):
    timeline = report_files.timeline(120)
    if cells == 1:  # one owner is followed: that with the most bytes
        monkeypatch.setattr(recording, "CELLS", cells)
    content = recording.described(timeline)
    last = None
    for event, top in zip(accumulate(content["points"]), content["top"]):
        top = last = last if top is None else top
        got = [size for _, size in top]
        owners = [owner.bytes for owner in timeline.owners(event)]
        if cells == 1:
            assert len(got) <= 1
        else:
            assert got == owners[: recording.AT_A_POINT]


def test_owners_at_the_peak_add_up_when_most_are_left_out(monkeypatch):
    monkeypatch.setattr(recording, "OWNERS", 5)
    timeline = report_files.timeline(150)
    content = recording.described(timeline)
    listed = sum(owner[4] for owner in content["owners"])
    rest = sum(size for size, _ in content["rest"])
    assert listed + rest == timeline.peak_bytes and rest > 0
    number = sum(owner[5] for owner in content["owners"]) + sum(n for _, n in content["rest"])
    assert number == len(timeline.live())
    owners = timeline.owners()[:5]
    assert [owner[4] for owner in content["owners"][:5]] == [owner.bytes for owner in owners]
    assert content["summary"]["peak_by_kind"] == walked(timeline, timeline.peak_index)


@pytest.mark.parametrize(
    "timeline",
    [Timeline([]), Timeline([Allocation(0, 7)]), Timeline([Allocation(0, 0, 0, 0)])],
    ids=["nothing", "one", "empty"],
)
def test_timelines_with_almost_nothing(timeline):
    content = recording.described(timeline)
    assert content["summary"]["peak_bytes"] == timeline.peak_bytes
    json.dumps(content, allow_nan=False)


def small():
    made = [
        Allocation(0, 3000, 0, None, "parameters", "0", "0.weight"),
        Allocation(1, 1000, 1, 5, "activations", "layers.3.mlp", "aten::mm", stack=("a.py:1 f",)),
        Allocation(2, 500, 2, 4, "activations", stack=("a.py:2 f",)),
        Allocation(3, 500, 3, 4, "activations", stack=("a.py:2 f",)),
        Allocation(4, 200, 5, None, "gradients", None, "aten::add"),
        Allocation(5, 100, 3, 4, "temporaries"),
    ]
    return Timeline(made, [Span(0, 0, "forward"), Span(4, 0, "backward")], "cuda:0", ["A note."])


def with_host():
    """The small timeline, with states on the host all the time, and activations for a while."""
    held = [Allocation(0, 700, 0, None, "optimizer_state"), Allocation(1, 90, 2, 4, "activations")]
    timeline = small()
    timeline.host = Timeline(held, timeline.spans, "host")
    return timeline


def test_what_is_on_the_host_is_a_line():
    content = recording.described(with_host(), [5000] * 5 + [4000])
    wanted = recording.described(small(), [5000] * 5 + [4000])
    wanted["lines"]["on the host"] = [700, 0, 90, 0, -90, 0]
    wanted["summary"]["host_peak_bytes"] = 790
    assert content == wanted


def test_all_that_is_shown_of_a_small_timeline():
    zeros = [0, 0, 0, 0, 0, 0]
    assert recording.described(small(), [5000] * 5 + [4000]) == {
        "summary": {
            "device": "cuda:0", "peak_bytes": 5100, "peak_event": 3, "peak_phase": "forward",
            "peak_step": 0, "end_bytes": 3200, "allocations": 6, "events": 6,
            "peak_by_kind": {"parameters": 3000, "activations": 2000, "temporaries": 100},
        },
        "kinds": list(KINDS),
        "events": 6,
        "peak": 3,
        "points": [0, 1, 1, 1, 1, 1],
        "series": {
            "kind": {
                "parameters": [3000, *zeros[1:]],
                "gradients": [*zeros[1:], 200],
                "activations": [0, 1000, 500, 500, -1000, -1000],
                "temporaries": [0, 0, 0, 100, -100, 0],
            },
            "module": {
                "0": [3000, *zeros[1:]],
                "no module": [0, 0, 500, 600, -1100, 200],
                "layers.3": [0, 1000, 0, 0, 0, -1000],
            },
            "line": {
                "0.weight": [3000, *zeros[1:]],
                "a.py:1 f": [0, 1000, 0, 0, 0, -1000],
                "a.py:2 f": [0, 0, 500, 500, -1000, 0],
                "unknown": [0, 0, 0, 100, -100, 0],
                "aten::add": [*zeros[1:], 200],
            },
        },
        "lines": {"reserved": [5000, 0, 0, 0, 0, -1000]},
        "top": [
            [[0, 3000]],
            [[0, 3000], [1, 1000]],
            [[0, 3000], [1, 1000], [2, 500]],
            [[0, 3000], [1, 1000], [2, 1000], [3, 100]],
            [[0, 3000], [1, 1000]],
            [[0, 3000], [4, 200]],
        ],
        "bands": [[0, 0, "forward"], [4, 0, "backward"]],
        "owners": [
            [0, 0, 1, 0, 3000, 1],
            [6, 3, 4, 1, 1000, 1],
            [6, None, None, 2, 1000, 2],
            [9, None, None, 0, 100, 1],
            [3, None, 6, 0, 0, 0],
        ],
        "rest": [[0, 0]] * 10,
        "strings": [
            *("0", "0.weight", "a.py:1 f", "layers.3.mlp", "aten::mm", "a.py:2 f", "aten::add")
        ],
        "stacks": [[], [2], [5]],
        "notes": ["A note."],
    }  # fmt: skip


def test_what_is_the_same_at_the_next_point_is_not_repeated():
    made = [Allocation(0, 10, 0), Allocation(1, 5, 2, 3, op="x"), Allocation(2, 0, 4, op="y")]
    assert recording.described(Timeline(made))["top"] == [
        *([[0, 10]], None, [[0, 10], [1, 5]], [[0, 10]], None)
    ]


@pytest.mark.parametrize("most, shown", [(3, [0, 1, 7]), (2, [1])])
def test_of_many_phases_those_that_can_be_seen_are_shown(most, shown, monkeypatch):
    """Of 12 events, phases take 1, 6 and 5."""
    monkeypatch.setattr(recording, "BANDS", most)
    spans = [Span(0, 0, "forward"), Span(1, 0, "backward"), Span(7, 0, "optimizer")]
    timeline = Timeline([Allocation(0, 7, 11)], spans)
    assert timeline.events == 12
    assert [start for start, _, _ in recording.described(timeline)["bands"]] == shown


def test_modules_end_below_a_list_and_others_are_one():
    names = ["", "a", "a.b.c", "a.b.3.c.4", "7.x.y", *(f"m.{k}" for k in range(12))]
    made = [Allocation(k, 100 - k, module=name) for k, name in enumerate(names)]
    found = recording.described(Timeline(made))["series"]["module"]
    groups = ["(model)", "a", "a.b", "a.b.3", "7", "m.0", "m.1", "m.2", "m.3"]
    sizes = {name: 100 - k for k, name in enumerate(groups)}
    assert {name: sum(row) for name, row in found.items()} == (
        sizes | {"others": sum(100 - k for k in range(9, 17))}
    )


def test_lines_are_those_of_the_user_or_else_the_operation():
    made = [
        Allocation(0, 7, stack=("a.py:1 f", "b.py:2 g")),
        Allocation(1, 6, op="aten::mm"),
        Allocation(2, 5, op="aten::mm", stack=("c.py:3 h",)),
        Allocation(3, 4),
    ]
    lines = recording.described(Timeline(made))["series"]["line"]
    sizes = {name: sum(row) for name, row in lines.items()}
    assert sizes == {"a.py:1 f": 7, "aten::mm": 6, "c.py:3 h": 5, "unknown": 4}


def test_segments_of_a_snapshot(tmp_path):
    value = report_files.snapshot(801)
    [part] = read(report_files.write_snapshot(tmp_path / "run.pickle", value))
    blocks = [block for segment in value["segments"] for block in segment["blocks"]]
    used = [block for block in blocks if block["state"] == "active_allocated"]
    held = part.summary["segments"]
    assert held["reserved_bytes"] == sum(block["size"] for block in blocks)
    assert held["allocated_bytes"] == sum(block["size"] for block in used)
    assert held["requested_bytes"] == sum(block["requested_size"] for block in used)
    assert held["free_bytes"] == held["reserved_bytes"] - held["allocated_bytes"]
    free = [block["size"] for block in blocks if block not in used]
    assert held["largest_free_block_bytes"] == max(free)
    live = {}
    for entry in value["device_traces"][0]:
        change = entry["size"] if entry["action"] == "alloc" else -entry["size"]
        live[len(live)] = change
    assert part.summary["peak_bytes"] == max(accumulate(live.values()))
    assert part.summary["end_bytes"] == sum(live.values())


@pytest.mark.slow
def test_a_million_events(tmp_path):
    """In at most 20 seconds of the processor and 10 MB."""
    from headroom.reports import report

    path = report_files.write_snapshot(tmp_path / "run.pickle", report_files.snapshot(1_000_000))
    begin = time.process_time()
    [part] = report([path], tmp_path / "run.html")
    assert time.process_time() - begin <= 20
    assert (tmp_path / "run.html").stat().st_size <= 10_000_000
    assert part.summary["events"] == 1_000_001
