"""Parts of a snapshot by hand: its pages, tags, lines and phases."""

import json

import torch
from headroom.memory import Allocation, load_snapshot, snapshot
from headroom.memory.snapshots.history import History
from headroom.memory.snapshots.tags import Tag, tag_of
from headroom.memory.snapshots.write import snapshot_of_history
from headroom.memory.stream import Event, Label, Note
from torch import nn


def history(*events):
    made = History([])
    made.note(Note([Label(4096, 100, "parameters", "up", "weight")]))
    for event in events:
        made.see(event)
    return made


def test_pages_and_blocks_of_a_history():
    """Allocations in pages of 4096 bytes, with the gaps between them."""
    found = snapshot_of_history(
        history(
            Event("alloc", 5000, 50, "aten::empty", time_us=7),
            Event("alloc", 20480, 2 << 20, time_us=8),
            Event("alloc", 9000, 10, time_us=8),
            Event("free", 9000, 10, time_us=9),
        ),
        "cpu",
        {"size": 5, "device_free": 6},
    )
    shown = [
        (s["address"], s["total_size"], s["active_size"], s["segment_type"])
        for s in found["segments"]
    ]
    assert shown == [(4096, 8192, 150, "small"), (20480, 2 << 20, 2 << 20, "large")]
    blocks = [
        (b["address"], b["size"], b["state"], b.get("category"))
        for b in found["segments"][0]["blocks"]
    ]
    assert blocks == [
        (4096, 100, "active_allocated", "parameters"), (4196, 804, "inactive", None),
        (5000, 50, "active_allocated", "temporaries"), (5050, 12288 - 5050, "inactive", None),
    ]  # fmt: skip
    trace = [
        (e["action"], e["addr"] if "addr" in e else None, e["time_us"])
        for e in found["device_traces"][0]
    ]
    assert trace == [
        ("alloc", 5000, 7), ("alloc", 20480, 8), ("alloc", 9000, 8), ("free_requested", 9000, 9),
        ("free_completed", 9000, 9), ("oom", None, 9), ("snapshot", 0, 9),
    ]  # fmt: skip
    assert found["headroom"]["devices"] == ["cpu"]


def test_what_another_took_the_place_of_has_ended():
    """Another thread freed it, which recorders do not see: the later one stays."""
    places = ((8192, 100), (8250, 10), (12288, 10), (12280, 50), (12320, 5), (8280, 5))
    made = history(*(Event("alloc", at, size) for at, size in places))
    made.end_what_was_overwritten()
    live = sorted((made.address(a), a.bytes) for a in made.allocations if a.end is None)
    assert live == [(4096, 100), (8250, 10), (8280, 5), (12320, 5)]
    assert [a.end for a in made.allocations] == [None, 2, None, 4, 5, None, None]


def test_lines_of_paths_with_spaces(tmp_path):
    path = tmp_path / "s.pickle"
    lines = ("my run/a b.py:12 f", "x.py:3 <lambda>", "<string>:1 g h")
    made = history(Event("alloc", 8192, 100, stack=lines, time_us=1))
    frames = snapshot_of_history(made, "cpu")["device_traces"][0][0]["frames"][1:]
    assert [(f["filename"], f["line"], f["name"]) for f in frames] == [
        ("my run/a b.py", 12, "f"), ("x.py", 3, "<lambda>"), ("<string>", 1, "g h"),
    ]  # fmt: skip
    assert not path.exists()


def test_tags_in_words_and_back():
    tag = Tag.of(Allocation(0, 1, kind="activations", module="", op="aten::mm", step=3))
    assert tag == ("activations", "", "aten::mm", "other", 3)
    assert tag.frame() == {
        "name": "activations of (model) (aten::mm), other of step 3",
        "filename": "<headroom>", "line": 3,
    }  # fmt: skip
    assert tag_of({"user_metadata": tag.metadata()}) == tag
    assert '"user":"mine"' in tag.metadata("mine") and "user" not in tag.metadata()
    assert tag_of({"user_metadata": tag.metadata("mine")}) == tag
    assert tag_of({"user_metadata": "mine"}) is None and tag_of({}) is None
    assert tag_of({"category": "gradient"}) == ("gradients", None, None, "other", 0)
    assert tag_of({"category": "batch"}).kind == "batch" and tag_of({"category": "x"}).kind == (
        "temporaries"
    )
    good = {"kind": "batch", "module": None, "op": None, "phase": "other", "step": 0}
    for bad in ({"step": True}, {"step": -1}, {"step": "1"}, {"module": 3}, {"op": []},
                {"phase": "noon"}, {"kind": "x"}):  # fmt: skip
        assert tag_of({"user_metadata": json.dumps(good | bad, separators=(",", ":"))}) is None


def test_a_step_ends_with_its_last_optimizer(tmp_path):
    """The phases of a snapshot, with two optimizers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9) for layer in model]
    path = tmp_path / "s.pickle"
    with snapshot(path, model, optimizers, stacks=False):
        for _ in range(2):
            model(torch.ones(3, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = load_snapshot(path)
    spans = [(span.step, span.phase) for span in found.timeline.spans]
    assert (1, "forward") in spans and (2, "forward") not in spans
    names = {a["name"] for a in found.data["external_annotations"]}
    assert {"headroom::step 0 optimizer", "headroom::step 1 backward"} <= names
    assert not any("step 2 forward" in name for name in names)
