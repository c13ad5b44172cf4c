"""Files for ``headroom report`` with places changed, and bytes flipped, cut out or repeated: each
is refused with ValueError, or makes a page whose numbers are finite, in little time and memory.

    python -m tests.python.fuzz.reports --cases 10000 --seconds 3600
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from headroom.reports import html, read, terminal
from tests.python.fuzz._driver import main, mutated
from tests.python.helpers import report_files

SECONDS, BYTES = 10, 1 << 30  # that one file may take


@cache
def sources() -> tuple[object, ...]:
    """A plan, a timeline, a ladder, a profile, and a snapshot."""
    plan = report_files.plan(24)
    values = plan.to_json(), plan.timeline.to_json(), report_files.ladder(), report_files.profile(5)
    return *(json.loads(json.dumps(value)) for value in values), report_files.snapshot(40)


def written(rng: random.Random) -> bytes:
    """The bytes of a file that is nearly right."""
    source = rng.choice(sources())
    is_snapshot = "device_traces" in source  # type: ignore[operator]
    value = mutated(rng, source, rng.choice([0, 1, 1, 2, 5]))
    try:
        made = pickle.dumps(value, 4) if is_snapshot else json.dumps(value).encode()
    except (TypeError, ValueError, AttributeError, pickle.PicklingError):
        return written(rng)  # a value that no such file can hold
    if rng.random() < 0.5:
        made = damaged(rng, made)
    return made


def damaged(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 2, 9, 300]))
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:at] + rng.randbytes(rng.choice([1, 4])) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[end:]
        elif kind == 2:
            data = data[:at] + data[at:end] * 3 + data[end:]
        elif kind == 3:
            data = data[:at] + rng.choice([b"9" * 30, b"-1", b"1e999", b"[[", b"null"]) + data[at:]
        else:
            data = data[:at]
    return data


def case(rng: random.Random) -> str:
    data = written(rng)
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        try:
            parts = read(path)
        except ValueError as error:
            assert str(path) in str(error) and len(str(error)) < 2000
            outcome = "refused"
        else:
            page = html.page_of(parts, "title")  # refuses numbers that are not finite
            assert page.count("<script") == 2 and len(page) < 5_000_000
            assert terminal.text_of(parts)
            for part in parts:
                json.dumps(part.summary, allow_nan=False)
            outcome = "shown"
        assert [one.name for one in Path(folder).iterdir()] == ["file"]
    assert time.process_time() - begin < SECONDS
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) << 10 < BYTES
    return outcome


if __name__ == "__main__":
    sys.exit(main(case))
