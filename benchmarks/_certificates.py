"""Rehearses ways to fine-tune Llama-3-8B, and keeps their certificates, which `headroom verify`
replays: `python -m benchmarks._certificates`, some minutes on a machine without a GPU. Then, and
with `--table` at once, it prints the rows of README's table of those that are kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = HERE / "results" / "certificates"
PROGRAM = HERE.parent / "examples" / "fine_tune_8b.py"
SMALL = ("--memory", "7.6 GiB", "--capability", "8.9")  # of an RTX 4060 with 8 GB
MIDDLE = ("--memory", "15.6 GiB", "--capability", "8.9")
LARGE = ("--gpu", "H100")
WAYS = {  # what each is rehearsed on
    "full torch": LARGE,
    "full others": LARGE,
    "full headroom": LARGE,
    "full states": ("--gpu", "RTX 4090"),
    "full streamed": SMALL,
    "qlora others": MIDDLE,
    "qlora headroom": SMALL,
}
COLUMNS = (  # of the table: ways, the one that is preferred first
    ("full torch",),
    ("full others",),
    ("full headroom", "full states", "full streamed"),
    ("qlora others",),
    ("qlora headroom",),
)
GB = (8, 16, 24, 80)  # of GPUs


def file_of(way: str) -> Path:
    return FOLDER / f"fine_tune_8b-{way.replace(' ', '-')}.json"


def command(way: str, certificate: Path) -> list[str]:
    """Returns the words that rehearse a way and write its certificate."""
    options = [*WAYS[way], "--steps", "2", "--certificate", str(certificate)]
    start = [sys.executable, "-m", "headroom_rehearsal", *options]
    return [*start, str(PROGRAM.relative_to(HERE.parent)), *way.split()]


def taken(report: Mapping[str, Any]) -> int:
    """Returns the bytes that a way takes of the GPU."""
    return report["peak_reserved"] + report["device"]["context"]


def share_of_torch(gb: int) -> float:
    """Returns the bytes that torch has at least of a GPU of so many GB."""
    return 0.95 * gb * 2**30


def cell(gb: int, ways: tuple[str, ...], reports: Mapping[str, Any]) -> str:
    """Returns what the first of some ways takes that fits a GPU."""
    for way in ways:
        if (size := taken(reports[way])) <= share_of_torch(gb):
            is_on_host = way in ("full states", "full streamed")
            host = f", {reports[way]['host']['peak'] / 2**30:.0f} on the host" if is_on_host else ""
            return f"{size / 2**30:.1f} GiB{host}"
    return "-"


def row(gb: int, reports: Mapping[str, Any]) -> str:
    """Returns the row of a GPU in the table."""
    cells = (cell(gb, ways, reports) for ways in COLUMNS)
    return f"| {gb} GB | {' | '.join(cells)} |"


def main() -> None:
    from headroom_rehearsal.certificate import verify

    parser = argparse.ArgumentParser(prog="python -m benchmarks._certificates", description=__doc__)
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        FOLDER.mkdir(exist_ok=True)
        for way in WAYS:
            subprocess.run(command(way, file_of(way)), cwd=HERE.parent, check=True)
    reports = {way: verify(file_of(way)).report for way in WAYS}
    for gb in GB:
        print(row(gb, reports))


if __name__ == "__main__":
    main()
