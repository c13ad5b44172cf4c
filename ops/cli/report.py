"""Makes one HTML page of snapshots, plans, timelines, profiles, rehearsals and the memory ladder,
for a browser and offline. Also shows them in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..reports import read, report
from ..reports.terminal import text_of
from .arguments import ArgumentError, count
from .output import print_json

HELP = "make a page of snapshots, plans and profiles"


def add_arguments(command: argparse.ArgumentParser) -> None:
    what = "a snapshot, plan, timeline, profile, rehearsal or ladder.json"
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help=what)
    where = "the page (default: the first FILE with .html in the current folder)"
    command.add_argument("-o", "--out", type=Path, metavar="HTML", help=where)
    command.add_argument("--title", help="of the page (default: the names of the files)")
    command.add_argument("--terminal", action="store_true", help="show it here, and write no page")
    command.add_argument("--top", type=count(0), default=10, metavar="N", help="owners shown here")


def run(options: argparse.Namespace) -> int:
    out = options.out or Path(options.files[0].name + ".html")
    clash = [
        path for path in options.files if path.exists() and out.exists() and path.samefile(out)
    ]
    if clash:
        raise ArgumentError(f"{clash[0]} is read, and would be replaced: choose another --out")
    if options.terminal and options.out is not None:
        raise ArgumentError("--terminal writes no page: leave --out out")
    if options.terminal:
        parts = [part for file in options.files for part in read(file)]
        written = []
    else:
        quiet = options.json or not sys.stderr.isatty()
        parts = report(options.files, out, title=options.title, progress=not quiet)
        written = [str(out)]
    if options.json:
        summaries = [part.summary for part in parts]
        print_json({"format": "headroom.report/1", "written": written, "parts": summaries})
        return 0
    if options.terminal:
        print(text_of(parts, options.top))
    for path in written:
        print(f"wrote {path}")
    return 0
