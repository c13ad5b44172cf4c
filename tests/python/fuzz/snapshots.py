"""Fuzzes what reads snapshots: files of the CPU and of CUDA with something changed.

A file is refused with ValueError, or read, and then everything that it offers can be looked at. No
code of it runs, no case takes long, and none takes much memory. There are six kinds of changes, so
that ``--cases 60000 --seconds 3600`` tries some 10,000 of each.
"""

import json
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path

import headroom
import torch
from headroom.memory.snapshots.explain import explain
from tests.python.fuzz._driver import main, mutated
from tests.python.helpers.snapshots import cuda_snapshot

KINDS = ("flipped", "cut", "spliced", "instructions", "changed", "hostile")
LONGEST = 5  # seconds of a case
MOST = 2 << 30  # bytes of address space that a case may take
INSTRUCTIONS = b"().012FGIJKLMNPQRSTUVXabcdeghijlopqrstu}]\x80\x81\x82\x85\x86\x87\x88\x89\x8a\x8b"
INSTRUCTIONS += b"\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x95\x96\x97\x98BC"
_ran: list = []
_made: dict = {}


def ran(*arguments) -> None:
    """What no file may call."""
    _ran.append(arguments)


class Payload:
    def __reduce__(self):
        return ran, ("payload",)


def sources() -> list[dict]:
    """Snapshots as they are."""
    if not _made:
        _made["folder"] = folder = Path(tempfile.mkdtemp())
        path = folder / "run.pickle"
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        with headroom.memory.snapshot(path, model, optimizer, stacks=False):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        cpu = headroom.memory.load_snapshot(path).data
        _made["sources"] = [cpu, cuda_snapshot()]
        # The first use of everything takes memory that no case is to blame for.
        look_at(headroom.memory.Snapshot(cpu))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST, resource.RLIM_INFINITY))
    return _made["sources"]


def case(rng: random.Random) -> str:
    snapshot = rng.choice(sources())
    kind = rng.choice(KINDS)
    data = changed(rng, snapshot, kind)
    path = _made["folder"] / "changed.pickle"
    path.write_bytes(data)
    begin = time.process_time()
    try:
        found = headroom.memory.load_snapshot(path)
    except ValueError as error:
        assert "is no snapshot" in str(error), error
        assert not isinstance(error.__cause__.__cause__, MemoryError), "it took too much memory"
        outcome = "refused"
    else:
        look_at(found)
        outcome = "read"
    assert not _ran, "code of the file ran"
    assert time.process_time() - begin < LONGEST, "it took too long"
    return f"{kind} {outcome}"


def changed(rng: random.Random, snapshot: dict, kind: str) -> bytes:
    """The file of a snapshot, with something else in it."""
    protocol = rng.choice([2, 3, 4, 4, 4, 5])
    if kind in ("changed", "hostile"):
        value = mutated(rng, snapshot, rng.choice([1, 2, 5]))
        if kind == "hostile":
            value = {**value, "more": Payload()} if isinstance(value, dict) else [value, Payload()]
        try:
            return pickle.dumps(value, rng.choice([0, 1, protocol]))
        except (pickle.PicklingError, TypeError, AttributeError, ValueError):
            return b""  # what cannot be written is no file
    data = bytearray(pickle.dumps(snapshot, protocol))
    at = rng.randrange(len(data))
    if kind == "cut":
        del data[at : len(data) if rng.random() < 0.5 else at + rng.randrange(1, 40)]
    elif kind == "flipped":
        for _ in range(rng.choice([1, 1, 3, 30])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "spliced":
        begin = rng.randrange(len(data))
        data[at:at] = data[begin : begin + rng.choice([1, 4, 20, 300])] * rng.choice([1, 1, 9])
    else:
        for _ in range(rng.choice([1, 1, 2, 6])):
            number = rng.choice([0, 1, 255, 2**16, 2**28, 2**31 - 1, 2**32 - 1])
            made = (
                bytes([rng.choice(INSTRUCTIONS)])
                + struct.pack("<I", number)[: rng.choice([0, 1, 4])]
            )
            made += struct.pack("<Q", rng.choice([0, 9, 2**40])) if rng.random() < 0.2 else b""
            place = rng.randrange(2, len(data))
            data[place : place + rng.choice([0, 0, 1, len(made)])] = made
    return bytes(data)


def look_at(found: headroom.memory.Snapshot) -> None:
    """Uses everything that a snapshot offers."""
    for device in found.devices:
        one = found.of(device)
        timeline = one.timeline
        assert sum(timeline.peak_by_kind.values()) == timeline.peak_bytes
        assert len(one.times) == len(one.reserved_over_events()) == timeline.events
        assert all(a.bytes >= 0 for a in (*one.at_peak(), *one.at_end()))
        sum(segment.free_bytes for segment in one.segments)
        timeline.table()
        explain(one, RuntimeError("x"), 5)
    both = headroom.reports.diff(found, headroom.memory.Snapshot(cuda_snapshot()), at="end")
    both.table()
    json.dumps(both.to_dict())


if __name__ == "__main__":
    sys.exit(main(case))
