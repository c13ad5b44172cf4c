"""Rehearses ways to fine-tune Llama-3-8B and mixtures of experts, and keeps their certificates,
which `headroom verify` replays: `python -m benchmarks._certificates [WAY ...]`, some minutes on a
machine without a GPU. Then, and with `--table` at once, it prints the rows of the tables of README
and docs/experts.md, of those that are kept.
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
EXAMPLES = HERE.parent / "examples"
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
MIXTURES = {
    "qwen3-30b": ("--gpu", "RTX 4090"),
    "qwen3-30b --host": SMALL,
    "gpt-oss-20b": MIDDLE,
    "gpt-oss-20b --host": SMALL,
    "mixtral-8x7b --host": SMALL,
}
COLUMNS = (  # of the table: ways, the one that is preferred first
    ("full torch",),
    ("full others",),
    ("full headroom", "full states", "full streamed"),
    ("qlora others",),
    ("qlora headroom",),
)
GB = (8, 16, 24, 80)  # of GPUs


def program_of(way: str) -> Path:
    return EXAMPLES / ("fine_tune_mixture.py" if way in MIXTURES else "fine_tune_8b.py")


def file_of(way: str) -> Path:
    words = "-".join(word.strip("-") for word in way.split())
    return FOLDER / f"{program_of(way).stem}-{words}.json"


def command(way: str, certificate: Path) -> list[str]:
    """Returns the words that rehearse a way and write its certificate."""
    options = [*(WAYS | MIXTURES)[way], "--steps", "2", "--certificate", str(certificate)]
    start = [sys.executable, "-m", "headroom_rehearsal", *options]
    return [*start, str(program_of(way).relative_to(HERE.parent)), *way.split()]


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


def mixture_row(way: str, report: Mapping[str, Any]) -> str:
    """Returns the row of a mixture in the table, but for what others take."""
    host = f"{report['host']['peak'] / 2**30:.0f} GiB" if "--host" in way else "-"
    return f"| `{way}` | {taken(report) / 2**30:.1f} GiB | {host} |"


def main() -> None:
    from headroom_rehearsal.certificate import verify

    parser = argparse.ArgumentParser(prog="python -m benchmarks._certificates", description=__doc__)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("ways", nargs="*", metavar="WAY", help="all, if none are given")
    args = parser.parse_args()
    if not args.table:
        FOLDER.mkdir(exist_ok=True)
        for way in args.ways or WAYS | MIXTURES:
            subprocess.run(command(way, file_of(way)), cwd=HERE.parent, check=True)
    reports = {way: verify(file_of(way)).report for way in WAYS | MIXTURES}
    for gb in GB:
        print(row(gb, reports))
    for way in MIXTURES:
        print(mixture_row(way, reports[way]))


if __name__ == "__main__":
    main()
