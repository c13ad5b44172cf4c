"""Says what grew from one snapshot, plan or timeline to another, by kind and stack. With
--fail-above, exits with 1 where it grew by more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .._core.progress import progress_bar
from .._core.sizes import format_bytes
from ..reports.diff import diff
from ..reports.files import load
from .arguments import count, size
from .output import print_json

HELP = "say what grew between two snapshots or plans"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("a", type=Path, metavar="A", help="the earlier run: a snapshot or a plan")
    command.add_argument("b", type=Path, metavar="B", help="the later one")
    what = "what is compared: when the most is live (default), or the end, such as for leaks"
    command.add_argument("--at", choices=("peak", "end"), default="peak", help=what)
    command.add_argument("--device", help="of the snapshots, such as cuda:1")
    command.add_argument(
        "--fail-above", type=size, metavar="SIZE", help='exit with 1 above this: "50 MiB"'
    )
    command.add_argument("--top", type=count(0), default=10, metavar="N", help="rows shown")


def run(options: argparse.Namespace) -> int:
    limit = options.fail_above
    files = options.a, options.b
    quiet = options.json or not sys.stderr.isatty()
    sides = []
    with progress_bar(2, "diff", unit="file", shown=not quiet) as bar:
        for file in files:
            sides.append(load(file))
            bar.update()
    found = diff(*sides, at=options.at, device=options.device)
    found.names = options.a.name, options.b.name
    fails = limit is not None and found.fails(limit)
    if options.json:
        print_json(found.to_dict() | {"fail_above": limit, "fails": fails})
    else:
        print(found.table(options.top))
        if fails:
            grown = f"grew by {format_bytes(found.growth)}, more than {format_bytes(limit or 0)}"
            print(f"headroom diff: {grown}", file=sys.stderr)
    return 1 if fails else 0
