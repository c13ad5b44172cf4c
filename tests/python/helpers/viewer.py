"""Gives snapshots to the functions of torch's own viewer."""

import contextlib
import copy
import io
import pickle

from torch.cuda import _memory_viz

__all__ = ["accepted_by_torch", "check_categories"]


def accepted_by_torch(data):
    """Calls every function of ``torch/cuda/_memory_viz.py`` on a snapshot, and compares what they
    say with what is in it."""
    live = [
        block
        for segment in data["segments"]
        for block in segment["blocks"]
        if block["state"].startswith("active")
    ]
    size = sum(block["requested_size"] for block in live)
    graph = _memory_viz.memory(data, _same)
    assert _sum(line for line in graph.splitlines() if ";active" in line) == size
    assert "<non-python>" not in "".join(s for s in graph.splitlines() if ";active" in s)
    held = sum(segment["total_size"] for segment in data["segments"])
    assert _sum(_memory_viz.segments(data, _same).splitlines()) == held
    with contextlib.redirect_stdout(io.StringIO()):
        assert _memory_viz.compare(data["segments"], data["segments"], _same) == ""
        _memory_viz.compare(data["segments"], [], _same)
    said = _memory_viz.segsum(data)
    assert f"segments: {len(data['segments'])}" in said
    assert f"total_allocated: {_memory_viz.Bytes(size)}" in said
    allocated = sum(entry["action"] == "alloc" for entry in data["device_traces"][0])
    assert _memory_viz.trace(data).count(" = ") == allocated
    for segments in (False, True):
        assert "MemoryViz.js" in _memory_viz.trace_plot(data, plot_segments=segments)
    assert "MemoryViz.js" in _memory_viz.segment_plot(data)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        _memory_viz.trace_plot(copy.deepcopy(data), filter_freed=True)
    assert printed.getvalue() == ""  # else a free without its request
    _readable_by_the_page(data)


def _same(lines):
    return lines


def _sum(lines):
    return sum(int(line.rpartition(" ")[2]) for line in lines)


def _readable_by_the_page(data):
    """What the page's own reader of pickles needs: every event lies in a segment, numbers are below
    2**63, and of types there are few."""
    ranges = [(s["address"], s["address"] + s["total_size"]) for s in data["segments"]]
    for entry in data["device_traces"][0]:
        if entry["action"] in ("alloc", "free_completed"):
            begin, end = entry["addr"], entry["addr"] + entry["size"]
            assert any(first <= begin and end <= last for first, last in ranges)
    check_categories(data)
    _check_types(data)
    assert pickle.dumps(data, protocol=4)[1] == 4


def check_categories(data):
    """Collects categories as ``annotate_snapshot`` of ``MemoryViz.js`` does. In it, the end of a
    free and its request become one event, whose category was seen with the request, and where there
    are categories without "unknown" it raises, because it adds that one to a misspelled list."""
    found = set()
    for trace in data["device_traces"]:
        before = None
        for entry in trace:
            if entry["action"] == "free_completed" and before is not None:
                if before["action"] == "free_requested" and before["addr"] == entry["addr"]:
                    before = None
                    continue
            if "category" in entry:
                found.add(entry["category"])
            before = entry
    assert not found or "unknown" in found, "memory_viz stops: no category is unknown"


def _check_types(value):
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) is str
            _check_types(item)
    elif type(value) in (list, tuple):
        for item in value:
            _check_types(item)
    elif type(value) is int:
        assert -(2**63) <= value < 2**63
    else:
        assert value is None or type(value) in (str, float, bool)
