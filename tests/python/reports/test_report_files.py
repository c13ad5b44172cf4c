"""Files that a report refuses, and what they leave behind: nothing."""

import copy
import json
import os
import pickle
import re
import resource

import pytest
from headroom.cli import main
from headroom.memory import Allocation, Snapshot, Span, Timeline
from headroom.planning import Plan
from headroom.reports import files, limits, read, report, terminal
from headroom.reports.profile import described as described_profile

from helpers import report_files


def plan():
    return report_files.plan(20).to_json()


def changed(value, *path, to):
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return value


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"hello", "is neither JSON nor a snapshot"),
    "an image": (b"\x89PNG\r\n", "is neither JSON nor a snapshot"),
    "half of JSON": (json.dumps(plan()).encode()[:-300], "is no JSON that can be read"),
    "not UTF-8": (b'{"format": "\xff"}', "is no JSON that can be read"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "NaN": (b'{"rungs": [NaN], "versions": {}}', "a rung is a NoneType"),
    "a long number": (b'{"rungs": ' + b"9" * 10_000 + b"}", "is no JSON that can be read"),
    "a list": (b"[1, 2]", "it holds a list"),
    "foreign": (b'{"a": 1, "b": 2}', "its keys are a, b"),
    "a trace": (b'{"traceEvents": []}', "open it in ui.perfetto.dev"),
    "a newer plan": (b'{"format": "headroom.plan/2"}', "its format is 'headroom.plan/2'"),
    "half of a pickle": (pickle.dumps(report_files.snapshot(50), 4)[:-30], "is no snapshot"),
    "code": (b"\x80\x04cos\nsystem\n(S'touch hit'\ntR.", "is no snapshot"),
    "another pickle": (pickle.dumps({"a": 1}, 4), "is no snapshot"),
    "a snapshot of nothing": (
        pickle.dumps({"device_traces": [[]], "segments": []}, 4),
        "was the recorder on?",
    ),
}
ROW = ("timeline", "allocations", 3)
BAD_PLANS = {
    "far away": ((*ROW, 2), 10**12, "the start of an allocation is 1000000000000, wanted"),
    "an end before the start": ((*ROW, 3), 0, "ends at 0, before its start"),
    "negative": ((*ROW, 1), -5, "the bytes of an allocation is -5"),
    "2**70 bytes": ((*ROW, 1), 2**70, "the bytes of an allocation"),
    "half a byte": ((*ROW, 1), 0.5, "wanted a whole number"),
    "an unknown kind": ((*ROW, 4), "jokes", "kind is 'jokes'"),
    "a kind that is a list": ((*ROW, 4), [], "is damaged"),
    "a stack outside": ((*ROW, -1), 10**6, "the stack of an allocation"),
    "a stack from behind": ((*ROW, -1), -1, "the stack of an allocation"),
    "a short row": (ROW, [1, 2], "wanted 10 values"),
    "a module that is a dict": ((*ROW, 5), {}, "the module of an allocation is a dict"),
    "an unknown phase": (("timeline", "spans", 1, 2), "lunch", "wanted [start, step, phase]"),
    "spans out of order": (("timeline", "spans", 1, 0), 10**5, "its spans are not in order"),
    "another timeline": (("timeline", "format"), "x", "not a timeline"),
    "a share that is text": (("device_share", "context"), "much", "is damaged"),
    "an unknown share": (("device_share", "magic"), 1, "is damaged"),
    "options that are a list": (("options",), [1], "is damaged"),
    "no timeline": (("timeline",), None, "its timeline is a NoneType"),
}


def refused(path, message, capsys):
    """Neither the function nor the command writes anything, and both say why."""
    folder = path.parent
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(ValueError) as error:
        report([path], folder / "out.html")
    assert message in str(error.value) and str(path) in str(error.value)
    assert len(str(error.value)) < 1000 + len(str(path))
    assert main(["report", str(path), "-o", str(folder / "out.html")]) == 1
    assert message in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_something_else(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content, message = BAD[name]
    (tmp_path / "file").write_bytes(content)
    refused(tmp_path / "file", message, capsys)
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("name", BAD_PLANS)
def test_plans_with_one_value_changed(name, tmp_path, capsys):
    path, value, message = BAD_PLANS[name]
    bad = changed(plan(), *path, to=value)
    (tmp_path / "plan.json").write_text(json.dumps(bad))
    refused(tmp_path / "plan.json", message, capsys)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("rungs",), [], "it has 0 rungs"),
        (("rungs", 1), 5, "a rung is a int"),
        (("rungs", 1, "peak_bytes"), "5", "the peak of a rung is '5'"),
        (("rungs", 1, "peak_bytes"), None, "the peak of a rung is None"),
        (("rungs", 1, "bytes"), [], "a rung has no bytes by kind"),
        (("rungs", 1, "bytes", "gradients"), -1, "bytes is -1"),
        (("rungs", 1, "title"), {}, "the title of a rung is a dict"),
        (("rungs", 1, "size"), 5, "the size of a rung is a int"),
        (("rungs", 1, "tokens_per_second"), True, "tokens_per_second of a rung is True"),
    ],
)
def test_ladders_with_one_value_changed(path, value, message, tmp_path, capsys):
    bad = changed(report_files.ladder(), *path, to=value)
    (tmp_path / "ladder.json").write_text(json.dumps(bad))
    refused(tmp_path / "ladder.json", message, capsys)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("version",), 2, "its version is 2, wanted 1"),
        (("steps",), {}, "steps is a dict, wanted a list"),
        (("steps", 0, "wall_us"), "long", "wall_us of a step is 'long'"),
        (("modules", 1, "name"), None, "the name of a module is a NoneType"),
        (("modules", 1, "total", "kept_bytes"), [], "kept_bytes of a module is []"),
        (("ops", 0, "calls"), True, "calls of an op is True"),
        (("memory", "cpu", "points", 2), [1], "a point of memory is [1]"),
        (("totals",), [], "totals is a list"),
        (("device",), None, "device is a NoneType"),
    ],
)
def test_profiles_with_one_value_changed(path, value, message, tmp_path, capsys):
    bad = changed(report_files.profile(), *path, to=value)
    (tmp_path / "profile.json").write_text(json.dumps(bad))
    refused(tmp_path / "profile.json", message, capsys)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("fits",), 1.5, "fits is 1.5"),
        (("device",), "T4", "the device is a str"),
        (("device", "memory"), "much", "the memory of the device is 'much'"),
        (("program", 1), 3, "a word of the program is a int"),
        (("at_peak",), {}, "at_peak is a dict"),
        (("at_peak", 0, "kind"), "jokes", "a kind is 'jokes'"),
        (("at_peak", 0, "stack", 1), None, "a line of a stack is a NoneType"),
        (("at_peak", 0, "bytes"), -1, "bytes is -1"),
        (("at_peak", 1), {}, "'kind' is missing"),
        (("refused", 0, "asked"), [], "what was asked for is []"),
        (("unknown_reads",), 3, "is damaged"),
        (("versions", "torch"), 2, "a version is a int"),
    ],
)
def test_rehearsals_with_one_value_changed(path, value, message, tmp_path, capsys):
    bad = changed(report_files.rehearsal(), *path, to=value)
    (tmp_path / "rehearsal.json").write_text(json.dumps(bad))
    refused(tmp_path / "rehearsal.json", message, capsys)


def test_files_that_are_no_files(tmp_path, capsys):
    with pytest.raises(ValueError, match="there is no .*missing"):
        read(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    with pytest.raises(ValueError, match="is not a file"):
        read(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a file"):
        read("/dev/zero")
    with pytest.raises(ValueError, match="there are no files"):
        report([], tmp_path / "out.html")


@pytest.mark.parametrize("start", [b"{", b"\x80\x04"])
def test_enormous_files(tmp_path, start):
    """They are refused by their size, before they are read."""
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="1.00 TiB, more than"):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_one_bad_file_of_two_leaves_the_old_page(tmp_path):
    report_files.plan().save(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "out.html").write_text("precious")
    with pytest.raises(ValueError, match="bad.json"):
        report([tmp_path / "good.json", tmp_path / "bad.json"], tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == "precious"
    report([tmp_path / "good.json"], tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_a_full_disk_leaves_no_page():
    with pytest.raises(OSError, match="not written"):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        import signal
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            report_files.plan().save(path / "plan.json")
            old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            try:
                report([path / "plan.json"], path / "out.html")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                signal.signal(signal.SIGXFSZ, old)
                assert sorted(file.name for file in path.iterdir()) == ["plan.json"]


def test_the_loss_of_a_rung_that_diverged_is_not_shown(tmp_path):
    ladder = report_files.ladder()
    ladder["rungs"][2]["held_out_bits_per_byte"] = float("nan")
    (tmp_path / "ladder.json").write_text(json.dumps(ladder))
    rungs = read(tmp_path / "ladder.json")[0].summary["rungs"]
    assert "held_out_bits_per_byte" in rungs[1]
    assert "held_out_bits_per_byte" not in rungs[2]


def test_a_rung_is_compared_with_the_first_of_its_size(tmp_path, capsys):
    ladder = report_files.ladder()
    for rung in ladder["rungs"][2:]:
        rung["size"] = "another"
    (tmp_path / "ladder.json").write_text(json.dumps(ladder))
    part = read(tmp_path / "ladder.json")[0]
    peaks = [rung["peak_bytes"] for rung in ladder["rungs"]]
    firsts = [rung["first_peak_bytes"] for rung in part.summary["rungs"]]
    assert firsts == [peaks[0], peaks[0], peaks[2], peaks[2]]
    assert part.summary["least_peak_bytes"] == peaks[1]
    shares = [line.split()[4] for line in terminal.text_of([part]).splitlines() if "rung " in line]
    assert shares == ["100%", "50%", "100%", "50%"]


def test_several_devices_and_a_note_on_what_is_missing(tmp_path):
    value = report_files.snapshot(300)
    value["device_traces"].append(report_files.snapshot(100, seed=1)["device_traces"][0])
    value["device_traces"][1].append(
        {"action": "oom", "size": 3 << 30, "device_free": 1 << 30, "time_us": 1, "stream": 0}
    )
    parts = read(report_files.write_snapshot(tmp_path / "run.pickle", value))
    assert [part.title for part in parts] == ["run.pickle, cuda:0", "run.pickle, cuda:1"]
    assert [part.summary["events"] for part in parts] == [301, 101]
    assert any("3.00 GiB were asked for" in note for note in parts[1].content["notes"])


def parts_of(folder):
    report_files.plan().save(folder / "plan.json")
    (folder / "ladder.json").write_text(json.dumps(report_files.ladder()))
    (folder / "profile.json").write_text(json.dumps(report_files.profile()))
    return [read(folder / f"{name}.json")[0] for name in ("plan", "ladder", "profile")]


def test_what_a_plan_says_beside_its_timeline(tmp_path):
    plan = report_files.plan()
    plan.save(tmp_path / "plan.json")
    [part] = read(tmp_path / "plan.json")
    assert part.title == "plan of Model" and part.summary["total_bytes"] == plan.total_bytes
    assert sum(part.summary["device_share"].values()) == 6000 + (400 << 20)
    assert files.format_bytes(plan.total_bytes) in terminal.text_of([part])
    plan.model = ""
    plan.save(tmp_path / "plan.json")
    assert read(tmp_path / "plan.json")[0].title == "plan"


def test_a_rehearsal_that_does_not_fit(tmp_path):
    value = report_files.rehearsal()
    (tmp_path / "rehearsal.json").write_text(json.dumps(value))
    [part] = read(tmp_path / "rehearsal.json")
    facts = part.summary
    assert part.title == "rehearsal on T4" and facts["kind"] == "rehearsal"
    assert facts["fits"] is False and facts["peak_bytes"] == value["peak_allocated"]
    kinds = {row["kind"] or "unknown": row["bytes"] for row in value["at_peak"]}
    assert facts["peak_by_kind"] == kinds
    shown = terminal.text_of([part])
    for words in (
        "train.py --batch 8: it does not fit on T4 of 600 MiB",
        "peak of tensors 52.0 MiB, reserved 92.0 MiB, and about 300 MiB of context",
        "ran out: 300 MiB beside 52.0 MiB of tensors, at train.py:15",
    ):
        assert words in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("optimizer state")]
    assert row.split()[2:5] == ["16.0", "MiB", "30.8%"]
    (owner,) = [line for line in shown.splitlines() if line.startswith("model.py:3 Block")]
    assert owner.split()[2:] == ["20.0", "MiB", "8"]
    with pytest.raises(ValueError, match="has no memory over time"):
        files.load(tmp_path / "rehearsal.json")


def test_what_has_memory_over_time_is_loaded(tmp_path):
    parts_of(tmp_path)
    timeline = report_files.timeline(9)
    (tmp_path / "timeline.json").write_text(json.dumps(timeline.to_json()))
    snapshot = report_files.write_snapshot(tmp_path / "run.pickle", report_files.snapshot(9))
    for path, kind in (("plan.json", Plan), ("timeline.json", Timeline), (snapshot, Snapshot)):
        assert type(files.load(tmp_path / path)) is kind
    for name in ("ladder", "profile"):
        with pytest.raises(ValueError, match=f"{name}.json has no memory over time"):
            files.load(tmp_path / f"{name}.json")


TEXT = """\
plan of Model
400 MiB on cuda:0, predicted
peak of tensors 4.98 KiB, in the forward phase of step 0

 4.98 KiB    █
           ▂██▂
           ████
          ▆█████
          ██████
          ██████
          ██████
      0 B ██████

parameters           2.93 KiB   58.8%  ████████████████
activations          1.95 KiB   39.2%  ███████████
temporaries             100 B    2.0%  █

owners at the peak                                bytes   count
0.weight                                       2.93 KiB       1
layers.3.mlp aten::mm                          0.98 KiB       1
a.py:2 f                                       0.98 KiB       2
A note.

the memory ladder
rung 0                                  320 MiB   100%  ████████████████████████████
rung 1                                  160 MiB    50%  ██████████████
rung 2                                 80.0 MiB    25%  ███████
rung 3                                 40.0 MiB    12%  ████

profile profile.json
14.60 ms a step, of 3 on cpu a CPU
41.0% model-FLOPs utilization

data                     0.50 ms    3.4%  █
forward                  4.00 ms   27.4%  ████████
backward                 8.00 ms   54.8%  ███████████████
optimizer                2.00 ms   13.7%  ████
other                    0.10 ms    0.7%

operations                                     own ms a step     calls
aten::op8                                              0.107        24
aten::op7                                              0.093        21
aten::op6                                              0.080        18
A note."""


def test_the_whole_text(tmp_path):
    plan = report_files.plan()
    made = [
        Allocation(0, 3000, 0, None, "parameters", "0", "0.weight"),
        Allocation(1, 1000, 1, 5, "activations", "layers.3.mlp", "aten::mm", stack=("a.py:1 f",)),
        Allocation(2, 500, 2, 4, "activations", stack=("a.py:2 f",)),
        Allocation(3, 500, 3, 4, "activations", stack=("a.py:2 f",)),
        Allocation(4, 200, 5, None, "gradients", None, "aten::add"),
        Allocation(5, 100, 3, 4, "temporaries"),
    ]
    spans = [Span(0, 0, "forward"), Span(4, 0, "backward")]
    plan.timeline = Timeline(made, spans, "cuda:0", ["A note."])
    parts_of(tmp_path)
    plan.save(tmp_path / "plan.json")
    names = ("plan", "ladder", "profile")
    parts = [read(tmp_path / f"{name}.json")[0] for name in names]
    assert terminal.text_of(parts, top=3) == TEXT
    sizes = {"rounding": 1000, "fragmentation": 2000, "workspaces": 3000, "context": 400 << 20}
    share = {"device_share": sizes, "options": {"optimizer": "AdamW"}}
    assert parts[0].content["plan"] == share and parts[0].summary["device_share"] == sizes


@pytest.mark.parametrize(
    "value, message",
    [
        ("x" * 99, "it is '" + "x" * 59 + ", wanted a number from 0 to 4.61169e+18"),
        (True, "it is True, wanted a number from 0 to 4.61169e+18"),
        (-1, "it is -1, wanted a number from 0 to 4.61169e+18"),
        (2**62 + 1, "it is 4611686018427387905, wanted a number from 0 to 4.61169e+18"),
    ],
)
def test_numbers_within_limits(value, message):
    with pytest.raises(ValueError) as error:
        limits.number(value, "it")
    assert str(error.value) == message
    assert limits.number(2**62, "it") == 2**62 and limits.number(0, "it") == 0
    assert limits.number(-1.5, "it", -1.5, 2) == -1.5


def test_as_much_of_a_profile_is_shown_as_a_page_can_take(tmp_path):
    value = report_files.profile(2)
    value["steps"] *= 200
    value["modules"] *= 2001
    value["ops"] *= 200
    value["notes"] *= 60
    value["notes"][0] = "n" * 500
    points = value["memory"]["cpu"]["points"] * 500
    value["memory"] = {f"d{k}": {"peak_bytes": k, "points": points} for k in range(17)}
    content = described_profile(value)
    assert content["summary"]["steps"] == 600
    for name, most in (("steps", 400), ("modules", 4000), ("ops", 1500), ("notes", 50)):
        assert len(content[name]) == most, name
    assert len(content["memory"]) == 16 and len(content["memory"][3]["points"]) == 2000
    assert content["memory"][3]["device"] == "d3" and content["memory"][3]["peak_bytes"] == 3
    assert len(content["notes"][0]) <= 401


def test_names_that_are_too_long_for_a_line_end_as_they_do(tmp_path):
    long = "a" * 40 + "".join(f"{n:02}" for n in range(30))
    profile = report_files.profile()
    profile["ops"][-1]["name"] = long
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    made = [Allocation(0, 7, module=long), Allocation(1, 7, module="a" * 42)]
    (tmp_path / "timeline.json").write_text(json.dumps(Timeline(made).to_json()))
    for name in ("profile", "timeline"):
        text = terminal.text_of(read(tmp_path / f"{name}.json"))
        assert f"..{long[-40:]} " in text and f".{long[-41:]}" not in text
    assert "a" * 42 + " " in text
    text = terminal.text_of(read(tmp_path / "profile.json"))
    assert re.search(r"\n\noperations +own ms a step +calls\n", text)


@pytest.mark.parametrize("count, more", [(3, None), (5, "3 more")])
def test_a_page_is_named_after_its_files(count, more, tmp_path):
    paths = [tmp_path / f"file-{number}.json" for number in range(count)]
    for path in paths:
        report_files.plan(3).save(path)
    report(paths, tmp_path / "out.html")
    title = re.search("<title>(.*?)</title>", (tmp_path / "out.html").read_text())[1]
    named = [path.name in title for path in paths]
    assert named == [True] * (2 if more else count) + [False] * (count - 2 if more else 0)
    assert title.endswith(f" and {more}") if more else "more" not in title


def test_text_for_a_terminal(tmp_path):
    plain = terminal.text_of(parts_of(tmp_path))
    timeline = report_files.plan().timeline
    assert f"peak of tensors {files.format_bytes(timeline.peak_bytes)}" in plain
    assert "rung 3" in plain and "41.0% model-FLOPs utilization" in plain
    heights = [line for line in plain.splitlines() if "█" in line]
    assert len(heights) > 8
