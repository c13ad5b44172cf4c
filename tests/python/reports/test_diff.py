"""What grew between two runs is found by kind and stack, whatever the addresses are."""

import json
import re

import headroom
import pytest
import torch
from headroom.memory import Allocation, Snapshot, Timeline, load_snapshot, snapshot, track
from headroom.reports import diff
from torch import nn

from helpers.snapshots import cuda_snapshot


def _run(path, width=16, leak=0, order=1, stacks=False):
    """Two steps of a model; ``leak`` tensors stay, at other addresses for another ``order``."""
    apart = [torch.empty(1000 + i) for i in range(50)][::order]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    with snapshot(path, model, optimizer, stacks=stacks):
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(leak):
            kept.append(torch.empty(300))
    del apart
    return path


def test_the_same_run_twice_does_not_differ(tmp_path):
    found = None
    for order in (1, 1, -1):  # the first steps of a process allocate more
        a = found
        found = _run(tmp_path / f"{len(list(tmp_path.iterdir()))}.pickle", order=order)
    both = diff(a, found)
    assert both.rows == [] and both.growth == 0 and not both.fails(0)
    assert "Nothing differs by stack." in str(both)
    addresses = [
        {e["addr"] for e in load_snapshot(p).data["device_traces"][0] if e["action"] == "alloc"}
        for p in (a, found)
    ]
    assert addresses[0] != addresses[1]


def test_what_leaks_is_named(tmp_path):
    _run(tmp_path / "warm-up")
    a = _run(tmp_path / "a.pickle", stacks=True)
    b = _run(tmp_path / "b.pickle", leak=5, stacks=True)
    found = diff(a, b, at="end")
    (row,) = found.rows
    assert (row.bytes_a, row.bytes_b, row.count_a, row.count_b) == (0, 5 * 1200, 0, 5)
    assert (row.kind, row.change, row.growth) == ("temporaries", "new", 6000)
    assert re.match(r"(reports/)?test_diff.py:\d+ _run", row.stack[0])
    assert found.growth == 6000 and found.fails("5 KiB") and not found.fails("6000 B")
    assert found.kinds["temporaries"][1] - found.kinds["temporaries"][0] == 6000
    assert found.names == ("a.pickle", "b.pickle")
    text = str(found)
    assert "+5.86 KiB  0 -> 5" in text and "new, temporaries: empty at test_diff.py:" in text
    assert max(map(len, text.splitlines())) <= 80
    back = diff(b, a, at="end")
    assert back.growth == -6000 and back.rows[0].change == "gone" and not back.fails(0)


def test_a_wider_layer_grows_in_every_kind(tmp_path):
    a, b = _run(tmp_path / "a.pickle", 16), _run(tmp_path / "b.pickle", 32)
    found = diff(a, b, at="end")
    more = 4 * (8 * 16 + 16 + 16 * 8)  # float32: two matrices and a bias
    grown = {kind: b - a for kind, (a, b) in found.kinds.items() if a != b}
    assert grown == {"parameters": more, "optimizer_state": 2 * more}
    assert sum(row.growth for row in found.rows) == found.growth == 3 * more
    assert {(row.module, row.op) for row in found.rows if row.kind == "parameters"} == {
        ("0", "weight"),
        ("0", "bias"),
        ("2", "weight"),
    }
    assert all(row.change == "grown" for row in found.rows)


def _timeline(*rows):
    made = [
        Allocation(i, size, 1, stack=stack, kind=kind) for i, (kind, size, stack) in enumerate(rows)
    ]
    return Timeline(made)


def test_lines_that_moved_belong_together():
    """Code was edited above; two lines of a function that moved are one row."""
    a = _timeline(
        ("activations", 100, ("m.py:10 forward", "run.py:5 main")),
        ("activations", 200, ("m.py:11 forward", "run.py:5 main")),
        ("gradients", 70, ("m.py:10 forward", "run.py:5 main")),
        ("temporaries", 9, ("same.py:1 f",)),
    )
    b = _timeline(
        ("activations", 150, ("m.py:20 forward", "run.py:9 main")),
        ("activations", 200, ("m.py:21 forward", "run.py:9 main")),
        ("activations", 5, ("m.py:21 backward", "run.py:9 main")),
        ("gradients", 70, ("m.py:20 forward", "run.py:9 main")),
        ("temporaries", 9, ("same.py:1 f",)),
        ("temporaries", 1, ("same.py:2 f",)),
    )
    found = diff(a, b)
    shown = [(row.kind, row.growth, row.change, row.count_a, row.count_b) for row in found.rows]
    assert shown == [
        ("activations", 50, "grown", 2, 2),
        ("activations", 5, "new", 0, 1),
        ("temporaries", 1, "new", 0, 1),
    ]
    assert found.rows[0].stack == ("m.py:21 forward", "run.py:9 main")  # that of the larger one


def test_the_table_has_both_sides_and_kinds_of_one_side_only():
    one = _timeline(("parameters", 100, ()))
    found = diff(one, _timeline(("activations", 50, ())))
    found.names = "before", "after"
    lines = [line.split() for line in str(found).splitlines()]
    assert lines[0] == ["before", "after", "growth"]
    assert ["parameters", "100", "B", "0", "B", "-100", "B"] in lines
    assert ["activations", "0", "B", "50", "B", "+50", "B"] in lines
    assert not any(line and line[0] == "gradients" for line in lines)


def _side(*rows):
    return Timeline([Allocation(i, *row[:-1], stack=row[-1]) for i, row in enumerate(rows)])


LONG = "a_function_with_a_name_that_is_longer_than_the_line"
DEEP = tuple(f"f{n}.py:{n} {LONG}" for n in range(4))
TEXT = f"""\
                           ..f-a.pickle     b.pickle       growth
live at the peak               6.29 KiB     8.33 KiB    +2.03 KiB
peak                           6.29 KiB     8.33 KiB    +2.03 KiB

kind
parameters                     4.00 KiB     4.00 KiB          0 B
gradients                         300 B        100 B       -200 B
batch                               0 B         70 B        +70 B
activations                    1.95 KiB     4.10 KiB    +2.15 KiB
temporaries                        50 B         60 B        +10 B

      growth  pieces      what
   +2.15 KiB  1 -> 2      .. {LONG}
                          .. {LONG}
                          .. {LONG}
                          .. {LONG}
       +70 B  0 -> 1      new, batch: empty
"""


def _both():
    weight = ("parameters", 0, None, "0", "0.weight", ())
    product = ("activations", 1, 4, "1", "aten::mm", DEEP)
    sizes = {"gradients": (300, 100), "temporaries": (50, 60)}
    sides = []
    for k, products in enumerate([[2000], [2000, 2200]]):
        rows = [(4096, weight), *((size, product) for size in products)]
        rows.append((sizes["gradients"][k], ("gradients", 2, None, None, None, ())))
        rows.append((sizes["temporaries"][k], ("temporaries", 1, None, None, "aten::add", ())))
        rows += [(70, ("batch", 1, None, None, "aten::empty", ()))] * k
        sides.append(_side(*((b, start, end, kind, *own) for b, (kind, start, end, *own) in rows)))
    return sides


def test_the_whole_text():
    found = diff(*_both())
    found.names, found.notes = ("a-long-name-of-a.pickle", "b.pickle"), ["A remark."]
    rows = ("       +10 B  1 -> 1      grown, temporaries: add\n"
            "      -200 B  1 -> 1      shrunk, gradients: ?\n")  # fmt: skip
    for text, end in (
        (found.table(2), "      -190 B              2 more\n"),
        (str(found), rows),
        (found.table(4), rows),
    ):
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        assert lines == f"{TEXT}{end}\nA remark."


def test_all_of_the_json():
    found = diff(*_both(), at="end").to_dict()
    assert found["totals"] == {"live": [4446, 4326], "peak": [6446, 8526]}
    assert found["growth"] == -120 and found["notes"] == [] and found["at"] == "end"
    assert found["names"] == ["timeline", "timeline"]
    assert {kind: sides for kind, sides in found["kinds"].items() if any(sides)} == {
        "parameters": [4096, 4096],
        "gradients": [300, 100],
        "batch": [0, 70],
        "temporaries": [50, 60],
    }
    assert len(found["kinds"]) == 10
    names = ("kind", "module", "op", "stack", "bytes_a", "bytes_b", "count_a", "count_b")
    rows = [
        ("batch", None, "aten::empty", [], 0, 70, 0, 1, 70, "new"),
        ("temporaries", None, "aten::add", [], 50, 60, 1, 1, 10, "grown"),
        ("gradients", None, None, [], 300, 100, 1, 1, -200, "shrunk"),
    ]
    assert found["rows"] == [dict(zip((*names, "growth", "change"), row)) for row in rows]


def test_snapshots_plans_and_tracked_runs_compare(tmp_path):
    model = nn.Linear(8, 8)
    with track(model) as tracked:
        model(torch.ones(2, 8)).sum().backward()
    plan = headroom.plan(model, torch.optim.SGD, torch.ones(2, 8), forward=lambda m, x: m(x).sum())
    found = diff(plan, tracked)
    assert found.names == ("plan", "tracked")
    assert found.kinds["parameters"] == (4 * 72, 4 * 72)
    assert found.totals["peak"] == (plan.peak_bytes, tracked.peak_bytes)


def test_fragmentation_of_the_allocator():
    a, b = cuda_snapshot(), cuda_snapshot()
    b["segments"][0]["total_size"] += 1 << 20
    b["segments"][0]["blocks"][-1]["size"] += 1 << 20
    found = diff(Snapshot(a), Snapshot(b))
    assert found.totals["reserved"] == (2 << 20, 3 << 20)
    assert found.totals["free in segments"] == found.totals["largest gap"]
    assert found.totals["largest gap"] == ((2 << 20) - 2048, (3 << 20) - 2048)
    assert found.growth == 0 and len(found.notes) == 2 and "every kind is" in found.notes[0]


def test_as_json(tmp_path):
    _run(tmp_path / "warm-up")
    a, b = _run(tmp_path / "a.pickle"), _run(tmp_path / "b.pickle", leak=2)
    found = diff(a, b, at="end")
    value = json.loads(json.dumps(found.to_dict()))
    assert value["format"] == "headroom.diff/1" and value["growth"] == 2400
    assert value["rows"][0]["change"] == "new" and value["rows"][0]["growth"] == 2400
    assert value["totals"]["live"][1] - value["totals"]["live"][0] == 2400


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="at is 'start', wanted one of peak, end"):
        diff(_timeline(), _timeline(), at="start")
    with pytest.raises(TypeError, match="got int, wanted the path of a snapshot"):
        diff(_timeline(), 3)
    (tmp_path / "x").write_text("x")
    with pytest.raises(ValueError, match="is no snapshot"):
        diff(tmp_path / "x", _timeline())
    with pytest.raises(ValueError, match="fail_above is '5 elephants'"):
        diff(_timeline(), _timeline()).fails("5 elephants")
