"""Reports and certificates of rehearsals as files, without a device: compared, replayed."""

import copy
import hashlib
import json

import pytest
from headroom.cli import main
from headroom_rehearsal.certificate import write
from headroom_rehearsal.compare import compared
from headroom_rehearsal.earlier import read_report

from helpers import report_files

MiB = 1 << 20
HERE, MOVED, THERE = ["a/b.py:3 f", "c.py:1 g"], ["a/b.py:9 f", "c.py:2 g"], ["d.py:1 h"]


def row(kind, stack, size, count=1):
    return {"kind": kind, "stack": stack, "bytes": size, "count": count}


def report(rows=(), **changed):
    return report_files.rehearsal() | {"fits": True, "at_peak": [*rows]} | changed


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
        (json.dumps(report(host={"peak": 0.5})), "is damaged: it has 0.5 in place of int"),
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


# ---- Certificates: each rule of the allocator decides the peaks of this trace -------------------


def entries(*rows):
    keys = ("action", "addr", "size", "stream")
    return [dict(zip(keys, row)) | {"pool_id": (0, 0)} for row in rows]


TRACE = entries(
    ("segment_alloc", 1000, 2 * MiB, 0),
    ("alloc", 1000, 600, 0),  # 1,024 bytes of a segment of 2 MiB
    ("alloc", 2000, 3 * MiB, 7),  # 3 of 20 MiB
    ("free_requested", 2000, 3 * MiB, 7),  # some stream still uses it
    ("alloc", 3000, 18 * MiB, 7),  # so that 17 MiB are free, and a segment of 18 is made
    ("free_completed", 2000, 3 * MiB, 7),
    ("alloc", 4000, 30 * MiB, 0),
    ("free_requested", 4000, 30 * MiB, 0),
    ("free_completed", 4000, 30 * MiB, 0),
    ("segment_free", 4000, 30 * MiB, 0),
    ("segment_free", 2000, 20 * MiB, 7),
    ("alloc", 4000, 31 * MiB, 0),  # a segment of 32, which is not split for 1 MiB
    ("alloc", 2000, 2 * MiB, 8),
    ("oom", None, 1 << 40, 0),
    ("alloc", 5000, 2 * MiB, 0),  # of another stream: a segment of 20 MiB for each
    ("free_requested", 3000, 18 * MiB, 7),
    ("free_completed", 3000, 18 * MiB, 7),
    ("segment_free", 3000, 18 * MiB, 7),
    ("alloc", 6000, 12 * MiB, 9),  # less than there was
)
PEAKS = {
    "peak_allocated": (18 + 32 + 2 + 2) * MiB + 1024,
    "peak_reserved": (2 + 18 + 32 + 40) * MiB,
}


def recorded(trace=TRACE, expandable=False):
    settings = {"expandable_segments": expandable}
    return {"device_traces": [trace], "allocator_settings": settings}


@pytest.fixture
def certificate(tmp_path):
    path = tmp_path / "c.json"
    (tmp_path / "train.py").write_text("a program")
    given = report(**PEAKS, program=["train.py", "--batch", "8"])
    write(path, given, recorded(), str(tmp_path / "train.py"))
    return path


def forged(path, **changed):
    """Writes a certificate whose checksum is right."""
    content = json.loads(path.read_text()) | changed
    del content["sha256"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))


def test_a_certificate_that_holds(certificate, capsys):
    assert main(["verify", str(certificate)]) == 0
    said = capsys.readouterr().out
    assert "train.py --batch 8" in said and "on T4 of 600 MiB, with torch 2.14.0: it fits" in said
    assert said.count("the same when replayed") == 2
    content = json.loads(certificate.read_text())
    assert content["events"][:6] == [1, 2, -2, 3, -2, 4]
    assert content["streams"] == [0, 1, 1, 0, 0, 2, 0, 3]
    assert content["program_sha256"] == hashlib.sha256(b"a program").hexdigest()
    forged(certificate)
    assert main(["verify", str(certificate)]) == 0


@pytest.mark.parametrize("key", PEAKS)
def test_a_certificate_that_does_not_hold(key, certificate, tmp_path, capsys):
    wrong = report(**PEAKS | {key: PEAKS[key] - 512})
    forged(certificate, report=wrong)
    assert main(["verify", str(certificate)]) == 1
    said = capsys.readouterr().out
    assert f"{PEAKS[key]:,} bytes when replayed, not {PEAKS[key] - 512:,}" in said
    assert said.count("the same when replayed") == 1
    with pytest.raises(ValueError, match="a replay of what was recorded has 54.0 MiB and 92.0 MiB"):
        write(tmp_path / "other.json", wrong, recorded(), "train.py")
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    "given, message",
    [
        (None, "the program has not used the device"),
        (recorded(TRACE[2:]), "with no replay"),
        (recorded(TRACE[3:]), "memory was freed whose allocation was not recorded"),
        (recorded(expandable=True), "segments were expandable and given back"),
    ],
)
def test_what_is_not_certified(given, message, tmp_path):
    message = message.replace("with no replay", "a replay of what was recorded has")
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "c.json", report(**PEAKS), copy.deepcopy(given), "train.py")
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda text: text.replace("629145600", "629145601").replace('"T4"', '"T5"'),
            "its checksum",
        ),
        (lambda text: text[:-9], "it is no JSON, or a part of one"),
        (lambda text: "[]", "its format is None, wanted 'headroom.certificate/1'"),
        ({"events": [1, 99]}, "its event 99 is no allocation, and frees none"),
        ({"events": [1, -1, -1, -1]}, "its event -1 is no allocation, and frees none"),
        ({"streams": []}, "are not those of a trace"),
        ({"sizes": [1, 2, 3, 4, 5, 6, 7, 0.5]}, "are not those of a trace"),
        ({"sizes": [1, 2, 3, 4, 5, 6, 7, 0]}, "are not those of a trace"),
        ({"report": None}, "is damaged: 'NoneType'"),
        ({"report": report(device={"name": "T4"})}, "is damaged: 'memory' is missing"),
    ],
)
def test_damaged_certificates(damage, message, certificate, capsys):
    if callable(damage):
        certificate.write_text(damage(certificate.read_text()))
    else:
        forged(certificate, **damage)
    assert main(["verify", str(certificate)]) == 1
    assert message in capsys.readouterr().err
