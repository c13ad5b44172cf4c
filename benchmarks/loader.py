"""Advice on loaders: whether the settings that headroom.data.advise returns are as fast as the best
of a grid.

Six loaders, and a step that sleeps, as the host does while a GPU computes; with one processor the
step computes in Python. Each setting makes three epochs, the start and the end of its workers timed
too, once a round and in random order. The bar: the median of the advised settings is at most 1.1
times that of the best of the grid.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from . import _report
from .harness import rows_of

AT_MOST = 1.1
EPOCHS = 3
MOST_ROUNDS = 7


class Decoded(Dataset):
    """Samples that native code decompresses, without the lock of the interpreter."""

    def __init__(self, count: int, size: int) -> None:
        values = torch.randint(64, (size,), generator=torch.Generator().manual_seed(0))
        self.count, self.bytes = count, zlib.compress(values.to(torch.uint8).numpy().tobytes(), 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        values = torch.frombuffer(bytearray(zlib.decompress(self.bytes)), dtype=torch.uint8)
        return values[:1024].float()


class Large(Dataset):
    """Large samples that are copied from memory."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.values = count, torch.rand(16, size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.values[i % 16] * 2


class Files(Dataset):
    """Many small files, each after the latency of a network."""

    def __init__(self, count: int, latency: float) -> None:
        self.count, self.latency = count, latency
        self.folder = tempfile.TemporaryDirectory()
        for i in range(64):
            (Path(self.folder.name) / f"{i}.bin").write_bytes(bytes(4096))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(self.latency)
        data = (Path(self.folder.name) / f"{i % 64}.bin").read_bytes()
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Words(Dataset):
    """Texts that are split in Python, which holds the lock of the interpreter."""

    def __init__(self, count: int, words: int) -> None:
        self.count, self.text = count, " ".join(f"word{i % 97}" for i in range(words))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        ids: dict[str, int] = {}
        return torch.tensor([ids.setdefault(word, len(ids)) for word in self.text.split()])


def sleeping(seconds: float) -> Callable[[Any], Any]:
    return lambda batch: time.sleep(seconds)


def computing(rounds: int) -> Callable[[Any], Any]:
    return lambda batch: sum(i * i for i in range(rounds))


@dataclass
class Case:
    """A loader of `make()`, its step, and whether one processor is all that there is."""

    name: str
    what: str
    make: Callable[[], DataLoader[Any]]
    step: Callable[[Any], Any]
    one_cpu: bool = False


def cases(device: torch.device, quick: bool) -> list[Case]:
    batches = 3 if quick else 30

    def of(
        data: Callable[[int], Dataset[Any]], size: int, count: int = batches
    ) -> Callable[[], DataLoader[Any]]:
        return lambda: DataLoader(data(count * size), batch_size=size)

    return [
        Case(
            "slow decode",
            "16 samples decompressed natively, a step of 10 ms",
            of(lambda count: Decoded(count, 350_000), 16),
            sleeping(0.010),
        ),
        Case(
            "large batches",
            "batches of 38 MB from memory, a step of 10 ms",
            of(lambda count: Large(count, 150_528), 64, min(batches, 12)),
            sleeping(0.010),
        ),
        Case(
            "many small files",
            "32 files of 4 KiB, 0.5 ms of latency each, a step of 8 ms",
            of(lambda count: Files(count, 0.0005), 32),
            sleeping(0.008),
        ),
        Case(
            "GIL-bound",
            "16 texts of 4,000 words split in Python, a step of 8 ms",
            of(lambda count: Words(count, 4000), 16),
            sleeping(0.008),
        ),
        Case(
            "already fast",
            "64 rows of a tensor, a step of 8 ms",
            lambda: DataLoader(torch.rand(batches * 64, 32), batch_size=64),
            sleeping(0.008),
        ),
        Case(
            "one processor",
            "16 texts of 1,000 words split in Python, a step that computes in Python",
            of(lambda count: Words(count, 1000), 16),
            computing(50_000),
            one_cpu=True,
        ),
    ]


@contextmanager
def processors(one: bool) -> Iterator[None]:
    """Leaves this process and its workers one processor, if there shall be only one."""
    before = os.sched_getaffinity(0)
    try:
        if one:
            os.sched_setaffinity(0, {min(before)})
        yield
    finally:
        os.sched_setaffinity(0, before)


def seconds(loader: DataLoader[Any], step: Callable[[Any], Any], epochs: int) -> float:
    """Returns the seconds of some epochs, of which the first starts the workers."""
    began = time.perf_counter()
    for _ in range(epochs):
        for batch in loader:
            step(batch)
    loader._iterator = None  # ends workers that persist
    return time.perf_counter() - began


def compared(case: Case, rounds: int, quick: bool) -> dict[str, Any]:
    """Returns the row of a case: the advised settings, and the times of all."""
    from headroom.data import Settings, advise, trials
    from headroom.data.settings import with_settings

    if quick:
        trials.SECONDS = 0.01
    loader = case.make()
    with processors(case.one_cpu):
        advice = advise(loader, case.step)
        tried = [Settings()]
        for workers in (1,) if quick else (1, 2, 4):
            tried += [Settings(workers, 2, False, persistent) for persistent in (False, True)]
        if advice.settings not in tried:
            tried.append(advice.settings)
        times: dict[Settings, list[float]] = {one: [] for one in tried}
        order = random.Random(0)
        for _ in range(rounds):
            for one in order.sample(tried, len(tried)):
                made = with_settings(loader, one)
                times[one].append(seconds(made, case.step, 1 if quick else EPOCHS))
    medians = {one: statistics.median(found) for one, found in times.items()}
    best = min(medians, key=lambda one: medians[one])
    ratio = medians[advice.settings] / medians[best]
    return {
        "advised": str(advice.settings),
        "best": str(best),
        "ratio": ratio,
        "met": ratio <= AT_MOST,
        "seconds": {str(one): found for one, found in times.items()},
        "trials": [asdict(trial) for trial in advice.trials],
        "reasons": [*advice.reasons],
    }


def show(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"{row['name']:<18}{row['failed'][:200]}", flush=True)
        return
    print(f"\n{row['name']}: {row['what']}")
    for name, found in row["seconds"].items():
        mark = " <- advised" if name == row["advised"] else ""
        mark += " <- best" if name == row["best"] else ""
        print(f"  {name:<78}{statistics.median(found):7.3f} s{mark}")
    verdict = "met" if row["met"] else "NOT MET"
    print(f"  advised over best {row['ratio']:.3f}, bar <= {AT_MOST:g}, {verdict}", flush=True)


def compare(options: Namespace, chosen: list[Case]) -> int:
    """Runs the cases: what ``python -m benchmarks loader`` does."""
    head = _report.header("loader", torch.device(options.device), options.quick)
    _report.show_header(head)
    rounds = 1 if options.quick else min(options.rounds, MOST_ROUNDS)
    rows = rows_of(
        chosen,
        lambda case: compared(case, rounds, options.quick),
        show,
        lambda rows: {**head, "rounds": rounds, "cases": rows},
        options.json,
    )
    failed = [row["name"] for row in rows if "failed" in row]
    missed = [row["name"] for row in rows if not row.get("met", True)]
    if failed:
        print(f"\ndid not run: {', '.join(failed)}")
    if options.check and missed:
        print(f"\nbars not met: {', '.join(missed)}")
    return 1 if failed or (options.check and missed) else 0
