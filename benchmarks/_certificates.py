"""Rehearses ways to fine-tune Llama-3-8B, and keeps their certificates, which `headroom verify`
replays: `python -m benchmarks._certificates`, some minutes on a machine without a GPU. Then, and
with `--table` at once, it prints README's table of those that are kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = HERE / "results" / "certificates"
PROGRAM = HERE.parent / "examples" / "fine_tune_8b.py"
SMALL = ("--memory", "7.6 GiB", "--capability", "8.9")  # of an RTX 4060 with 8 GB
MIDDLE = ("--memory", "15.6 GiB", "--capability", "8.9")
LARGE = ("--gpu", "H100")
WAYS = {
    "full torch": (LARGE, "all weights: transformers, fused AdamW of torch"),
    "full others": (LARGE, "all weights: checkpoints, AdamW8bit of bitsandbytes"),
    "full headroom": (LARGE, "all weights: Headroom"),
    "full streamed": (
        SMALL,
        "all weights: Headroom, weights and states on the host, {host:.0f} GiB there",
    ),
    "qlora others": (MIDDLE, "QLoRA: PEFT, bitsandbytes, checkpoints"),
    "qlora headroom": (SMALL, "QLoRA: Headroom"),
}
GB = (8, 12, 16, 24, 32, 40, 48, 80)  # of GPUs, of which torch has at least 0.95 GiB each


def file_of(way: str) -> Path:
    return FOLDER / f"fine_tune_8b-{way.replace(' ', '-')}.json"


def command(way: str, certificate: Path) -> list[str]:
    """Returns the words that rehearse a way and write its certificate."""
    options = [*WAYS[way][0], "--steps", "2", "--certificate", str(certificate)]
    start = [sys.executable, "-m", "headroom_rehearsal", *options]
    return [*start, str(PROGRAM.relative_to(HERE.parent)), *way.split()]


def row(way: str, report: dict[str, Any]) -> str:
    """Returns a way's row of the table."""
    taken = (report["peak_reserved"] + report["device"]["context"]) / 2**30
    host = report["host"]["peak"] / 2**30
    gb = next(gb for gb in GB if taken <= 0.95 * gb)
    return f"| {WAYS[way][1].format(host=host)} | {taken:.1f} GiB | {gb} GB |"


def main() -> None:
    from headroom_rehearsal.certificate import verify

    parser = argparse.ArgumentParser(prog="python -m benchmarks._certificates", description=__doc__)
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        FOLDER.mkdir(exist_ok=True)
        for way in WAYS:
            subprocess.run(command(way, file_of(way)), cwd=HERE.parent, check=True)
    for way in WAYS:
        print(row(way, verify(file_of(way)).report))


if __name__ == "__main__":
    main()
