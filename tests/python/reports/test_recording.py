"""Numbers of a report beside those that are counted one allocation after the other."""

import json
import time
from itertools import accumulate

import pytest
from headroom.memory import Allocation, Timeline
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
