"""Snapshots of torch are read, and files that are none, or that are made to harm, are refused."""

import os
import pickle
import struct
import time
import tracemalloc
from datetime import datetime

import pytest
import torch
from headroom.memory import load_snapshot, snapshot
from headroom.memory.stream import Label

from helpers.snapshots import OPTIMIZER, USER, cuda_snapshot, entry
from helpers.viewer import check_categories


def _written(path, value, protocol=4):
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_of_torch(protocol, tmp_path):
    found = load_snapshot(_written(tmp_path / "s.pickle", cuda_snapshot(), protocol))
    assert found.data == cuda_snapshot()
    assert (found.device, found.devices, found.has_kinds) == ("cuda:0", ["cuda:0"], False)
    timeline = found.timeline
    # 700 that another stream holds were there before, and 64 that were freed.
    assert timeline.bytes_over_events() == [764, 1064, 1264, 964, 1064, 1000]
    assert found.times == [101, 101, 102, 103, 104, 105]
    assert found.reserved_over_events() == [2 << 20] * 6  # the segment came before the first event
    assert [(a.bytes, a.phase) for a in timeline.allocations if a.start] == [
        (300, "other"),
        (200, "other"),
        (100, "optimizer"),
    ]
    assert [a.bytes for a in found.at_end()] == [700, 200, 100]
    (segment,) = found.segments
    assert [b.allocation and b.allocation.bytes for b in segment.blocks] == [100, 200, 700, None]
    assert segment.free_bytes == (2 << 20) - 2048
    (failure,) = found.out_of_memory
    assert (failure.event, failure.bytes, failure.device_free) == (5, 1 << 30, 512)
    assert timeline.allocations[2].stack == ("run/model.py:12 forward",)


def test_older_files_have_blocks_without_addresses(tmp_path):
    old = cuda_snapshot()
    for block in old["segments"][0]["blocks"]:
        del block["address"]
    found = load_snapshot(_written(tmp_path / "s.pickle", old))
    assert [a.bytes for a in found.at_end()] == [700, 200, 100]


def test_several_devices(tmp_path):
    both = cuda_snapshot()
    both["device_traces"][1] = [entry("alloc", 1, 5, USER) for _ in range(20)]
    path = _written(tmp_path / "s.pickle", both)
    found = load_snapshot(path)
    assert found.devices == ["cuda:0", "cuda:1"] and found.device == "cuda:1"
    assert found.timeline.peak_bytes == 5  # each takes the place of the one before
    assert found.of("cuda:0").timeline.device == "cuda:0"
    assert load_snapshot(path, device="cuda:0").timeline.peak_bytes == 1264
    with pytest.raises(ValueError, match="device is 'cpu', wanted one of cuda:0, cuda:1"):
        load_snapshot(path, device="cpu")


def test_categories_of_the_profiler_are_kinds(tmp_path):
    made = cuda_snapshot()
    names = iter(("parameter", "unknown", "activations"))
    for item in made["device_traces"][0]:
        if item["action"] == "alloc":
            item["category"] = next(names)
    found = load_snapshot(_written(tmp_path / "s.pickle", made))
    assert found.has_kinds
    kinds = [a.kind for a in found.timeline.allocations if a.start]
    assert kinds == ["parameters", "temporaries", "activations"]


# ---- CUDA, with what torch returns made by hand -----------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """A GPU whose allocator did what the snapshot made by hand says; the options of its history."""
    asked, anchor, memory = {}, torch.zeros(1), torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: asked.update(options))
    monkeypatch.setattr(memory, "_snapshot", lambda device: cuda_snapshot())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: anchor)
    monkeypatch.setattr(torch._C, "_cuda_annotateMemory", lambda *_: None, raising=False)
    return asked


def _recorded(path, notes, before=(), **options):
    """A snapshot of the device that took these notes, one of which stands at each mark of the
    trace."""
    with snapshot(path, device="cuda:0", **options) as recording:
        recording._tracked.before = list(before)
        for note in notes:
            recording._tracked.watch._take("note", note)
    return recording


def test_what_cuda_recorded_gets_kinds(tmp_path, cuda):
    notes = [
        {"labels": [Label(1000, 300, "activations")], "module": "up", "phase": "forward"},
        {"labels": [Label(1000, 100, "optimizer_state", "up", "exp_avg")]},
    ]
    before = [Label(5000, 64, "gradients", "up", "weight"), Label(2024, 700, "parameters", "", "w")]
    path = tmp_path / "s.pickle"
    _recorded(path, notes, before)
    found = load_snapshot(path)
    assert found.has_kinds and found.device == "cuda:0"
    described = [(a.bytes, a.kind, a.module, a.op, a.phase) for a in found.timeline.allocations]
    assert described == [
        (64, "gradients", "up", "weight", "other"),
        (700, "parameters", "", "w", "other"),
        (300, "activations", None, None, "other"),
        (200, "temporaries", "up", None, "forward"),
        (100, "optimizer_state", "up", "exp_avg", "optimizer"),
    ]
    assert found.timeline.peak_by_kind["activations"] == 300
    assert sum(found.timeline.peak_by_kind.values()) == 1264
    live = {a.bytes: a.kind for a in found.at_end()}
    assert live == {700: "parameters", 200: "temporaries", 100: "optimizer_state"}
    assert [span.phase for span in found.timeline.spans] == ["other", "forward", "optimizer"]
    trace = found.data["device_traces"][0]
    assert '"user":"mine"' in trace[3]["user_metadata"] and trace[3]["frames"][1:] == [USER]
    assert trace[1]["category"] == "activations" and trace[6]["frames"][1:] == [OPTIMIZER, USER]
    check_categories(found.data)
    names = {a["name"] for a in found.data["external_annotations"]}
    assert names == {
        "headroom::step 0 other",
        "headroom::step 0 forward",
        "headroom::step 0 optimizer",
    }


def test_what_is_there_at_the_end_has_its_kind(tmp_path, cuda):
    """Also what was never seen to become it."""
    with snapshot(tmp_path / "s.pickle", device="cuda:0") as recording:
        recording._tracked.watch.present = lambda: [Label(1512, 200, "parameters", "up", "weight")]
    live = {a.bytes: a.kind for a in load_snapshot(tmp_path / "s.pickle").at_end()}
    assert live == {700: "temporaries", 200: "parameters", 100: "temporaries"}


def test_cuda_drops_notes_whose_marks_are_gone(tmp_path, cuda):
    recording = _recorded(tmp_path / "a", [{"phase": "forward"}] * 50, max_entries=10)
    assert sorted(recording._tracked.watch.kept_notes()) == list(range(40, 50))


def test_torch_is_asked_for_a_bounded_history(tmp_path, cuda):
    with snapshot(tmp_path / "run.pickle", device="cuda:0", max_entries=123) as recording:
        assert cuda["max_entries"] == 123 and cuda["enabled"] == "all"
        assert (cuda["stacks"], cuda["context"]) == ("python", "alloc") and cuda["clear_history"]
        recording.dump(tmp_path / "now.pickle")
        assert cuda["enabled"] == "all"
    assert cuda["enabled"] is None
    assert [path.name for path in recording.files] == ["now.pickle", "run.pickle"]
    assert all(load_snapshot(path).timeline.peak_bytes == 1264 for path in recording.files)


# ---- bad files ----------------------------------------------------------------------------------


class _Payload:
    def __reduce__(self):
        return (print, ("ran",))


def test_no_code_of_a_file_runs(tmp_path, capsys):
    path = tmp_path / "s.pickle"
    hostile = [{"device_traces": [], "segments": [], "x": _Payload()}, _Payload(), datetime.now()]
    for value in hostile:
        for protocol in range(6):
            with pytest.raises(ValueError, match="is no snapshot"):
                load_snapshot(_written(path, value, protocol))
    with pytest.raises(ValueError, match=r"it holds the object __builtin__\.print"):
        load_snapshot(_written(path, _Payload(), 2))
    with pytest.raises(ValueError, match="it holds an object"):
        load_snapshot(_written(path, _Payload(), 4))
    assert "ran" not in capsys.readouterr().out


BOMBS = {
    "a table of 2**32 entries": b"\x80\x02}r\xff\xff\xff\xff.",
    "a table of 2**28 entries": b"\x80\x02}r\xff\xff\xff\x0f.",
    "text of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "a buffer of 2**35 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**35) + b".",
    "bytes": b"\x80\x04C\x01x.",
    "a number of many digits": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"1" * (1 << 20),
    "a number as text": b"\x80\x02I" + b"9" * 5000 + b"\n.",
    "text that is cut off": b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b"x.",
    "lists in lists": b"\x80\x04" + b"]" * (1 << 16) + b"a" * ((1 << 16) - 1) + b".",
    "a stack that is empty": b"\x80\x04].......a.",
    "marks": b"\x80\x04" + b"(" * 100_000 + b".",
    "a value that does not exist": b"\x80\x04h\x07.",
    "a key that is a list": b"\x80\x04}]]s.",
    "an extension": b"\x80\x04\x82\x01.",
    "a reference": b"\x80\x04]Q.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_cost_no_more_than_their_size(bomb, tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(BOMBS[bomb])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="is no snapshot"):
            load_snapshot(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 150 * len(BOMBS[bomb]) + (4 << 20)


def _frames(**frame):
    return {"frames": [{"name": "f", "filename": "f.py", "line": 1} | frame]}


def _repeated(**what):
    """As many entries as there are devices or texts to be read again and again."""
    trace = [entry("alloc", 4096 * k, 1, **(what or {})) for k in range(2000)]
    return {"device_traces": [trace], "segments": []}


SHARED = {
    "a trace": lambda: _repeated() | {"device_traces": _repeated()["device_traces"] * 2000},
    "blocks": lambda: {"device_traces": [], "segments": cuda_snapshot()["segments"] * 2000},
    "devices": lambda: {
        "device_traces": [[] for _ in range(4096)],
        "segments": [{"device": 4095 - k % 4096} for k in range(20_000)],
    },
}


@pytest.mark.parametrize("what", SHARED)
def test_what_is_shared_is_not_read_again_and_again(what, tmp_path):
    path = _written(tmp_path / "s.pickle", SHARED[what]())
    start = time.process_time()
    with pytest.raises(ValueError, match="share a list|is NoneType, wanted a number"):
        load_snapshot(path)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("key", ["user_metadata", "category", "name", "filename"])
def test_long_texts_that_many_entries_share(key, tmp_path):
    text = "x" * (1 << 20)
    made = _repeated(**({key: text} if key in ("user_metadata", "category") else {}))
    if key in ("name", "filename"):
        for number, item in enumerate(made["device_traces"][0]):
            item.update(_frames(**{key: text, "line": number}))
    path = _written(tmp_path / "s.pickle", made)
    tracemalloc.start()
    try:
        if key == "filename":
            with pytest.raises(ValueError, match=r"\['filename'\] is '.*, wanted a path"):
                load_snapshot(path)
        else:
            assert len(load_snapshot(path).timeline.allocations) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20


def test_a_file_without_devices(tmp_path):
    with pytest.raises(ValueError, match="is no snapshot: it has no devices"):
        load_snapshot(_written(tmp_path / "s.pickle", {"device_traces": [], "segments": []}))


def test_every_place_where_a_file_can_be_cut(tmp_path):
    path, whole = tmp_path / "s.pickle", pickle.dumps(cuda_snapshot(), protocol=4)
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is no snapshot"):
            load_snapshot(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("segments"), r"segments is NoneType, wanted a list"),
        (lambda s: s.update(device_traces={}), r"device_traces is dict, wanted a list"),
        (lambda s: s["segments"].append(3), r"segments\[1\] is 3, wanted a dict"),
        (lambda s: s["segments"][0].update(device=10**12), r"it has 1,000,000,000,001 devices"),
        (lambda s: s["segments"][0].pop("blocks"), r"segments\[0\]\['blocks'\] is NoneType"),
        (
            lambda s: s["segments"][0]["blocks"][2].update(size=-1),
            r"segments\[0\]\['blocks'\]\[2\]\['size'\] is -1, wanted a number from 0",
        ),
        (
            lambda s: s["segments"][0]["blocks"][2].update(state=[]),
            r"\['blocks'\]\[2\]\['state'\] is list, wanted text",
        ),
        (
            lambda s: s["device_traces"][0][3].update(size="1"),
            r"device_traces\[0\]\[3\]\['size'\] is '1', wanted a number",
        ),
        (lambda s: s["device_traces"][0][1].pop("addr"), r"\[0\]\[1\]\['addr'\] is NoneType"),
        (
            lambda s: s["device_traces"][0][3]["frames"].append({"name": "f", "filename": 3}),
            r"\['frames'\]\[1\]\['filename'\] is 3, wanted text",
        ),
        (lambda s: s["device_traces"][0][1].update(frames=7), r"\['frames'\] is 7, wanted a list"),
        (lambda s: s["device_traces"].__setitem__(0, "x"), r"device_traces\[0\] is 'x'"),
        (lambda s: s["device_traces"][1].append(5), r"device_traces\[1\]\[0\] is 5, wanted a dict"),
        (lambda s: s["device_traces"][0][2].update(action=[]), r"\[2\]\['action'\] is list"),
    ],
)
def test_what_is_wrong_is_named(change, said, tmp_path):
    made = cuda_snapshot()
    change(made)
    with pytest.raises(ValueError, match=said):
        load_snapshot(_written(tmp_path / "s.pickle", made))


def test_what_others_wrote_in_our_places_is_left_out(tmp_path):
    """Tags, spans and remarks that make no sense are as if they were not there."""
    for about in (
        3,
        {"devices": 3, "spans": "x", "remarks": {}},
        {"devices": ["a", "a"], "spans": [[[5, 0, "forward"], [1, 0, "other"]]]},
        {"devices": [[], 3, "x"], "spans": [[["x", 0, "forward"]]], "remarks": [3, []]},
        {"spans": [[[0, 0, "noon"]]]},
    ):
        made = cuda_snapshot() | {"headroom": about}
        for item, text in zip(
            made["device_traces"][0],
            ['{"kind":', '{"kind":["x"]}', '{"kind":"activations","step":-1}', '{"kind":' * 5000],
        ):
            item["user_metadata"] = text
        found = load_snapshot(_written(tmp_path / "s.pickle", made))
        assert not found.has_kinds and found.remarks == []
        assert found.timeline.peak_bytes == 1264


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_snapshot(tmp_path / "none")
    with pytest.raises(ValueError, match="it is no regular file"):
        load_snapshot(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="it is no regular file"):
        load_snapshot(tmp_path / "pipe")  # without waiting for a writer
    with pytest.raises(ValueError, match="it is no regular file"):
        load_snapshot("/dev/zero")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "s.pickle"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(ValueError, match=r"it has 1.00 TiB, more than 2.00 GiB: raise max_bytes"):
        load_snapshot(path)
    _written(path, cuda_snapshot())
    with pytest.raises(ValueError, match="more than 100 B"):
        load_snapshot(path, max_bytes=100)
    with pytest.raises(ValueError, match="max_bytes is 'many'"):
        load_snapshot(path, max_bytes="many")
