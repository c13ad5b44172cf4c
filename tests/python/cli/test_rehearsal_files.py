"""Reports of rehearsals as files, without a device: compared, damaged."""

import json

import pytest
from headroom_rehearsal.compare import compared
from headroom_rehearsal.earlier import read_report

MiB = 1 << 20
HERE, MOVED, THERE = ["a/b.py:3 f", "c.py:1 g"], ["a/b.py:9 f", "c.py:2 g"], ["d.py:1 h"]


def row(kind, stack, size, count=1):
    return {"kind": kind, "stack": stack, "bytes": size, "count": count}


def report(rows=(), **changed):
    return {
        "format": "headroom.rehearsal/1",
        "program": ["train.py", "--batch", "8"],
        "device": {"name": "T4", "memory": 15 << 30},
        "versions": {"python": "3.11.1", "torch": "2.14.0", "trl": "1.0"},
        "fits": True,
        "peak_allocated": 52 * MiB + 1024,
        "peak_reserved": 92 * MiB,
        "host_peak": 7 * MiB,
        "at_peak": [*rows],
    } | changed


def test_what_grew():
    before = report([row("parameters", HERE, 60, 2), row(None, THERE, 40), row(None, [], 5)])
    after = report(
        [row(None, THERE, 90, 3), row("parameters", MOVED, 60, 2), row("gradients", [], 7)],
        peak_allocated=60 * MiB,
        versions={"python": "3.11.1", "torch": "2.15.0", "peft": "0.9"},
    )
    found = compared("main.json", before, after)
    rows = [(one.kind, one.op, one.growth, one.change) for one in found.rows]
    assert rows == [
        ("others", "d.py:1 h", 50, "grown"),
        ("gradients", "no line (a backward pass)", 7, "new"),
        ("others", "no line (a backward pass)", -5, "gone"),
    ]
    assert found.kinds == {"parameters": (60, 60), "others": (45, 90), "gradients": (0, 7)}
    assert found.growth == 8 * MiB - 1024 and found.totals["reserved"] == (92 * MiB,) * 2
    notes = ["peft: none -> 0.9", "torch: 2.14.0 -> 2.15.0", "trl: 1.0 -> none"]
    assert found.notes == notes and found.names == ("main.json", "now")
    assert compared("main.json", before, before).notes == ["All versions are the same."]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ('{"format": "headroom.plan/1"}', "has the format 'headroom.plan/1', not"),
        (json.dumps(report(host_peak=0.5)), "is damaged: it has 0.5 in place of int"),
        (json.dumps(report([{"kind": None}])), "is damaged: 'bytes' is missing"),
        (json.dumps(report([row(None, [3], 1)])), "is damaged: it has 3 in place of str"),
    ],
)
def test_reports_that_cannot_be_compared(text, message, tmp_path):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_report(path)
    assert message in str(error.value) and str(path) in str(error.value)
    path.write_text(json.dumps(report()))
    assert read_report(path) == report()
