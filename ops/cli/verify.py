"""Replays the trace of certificates, which `headroom rehearse --certificate` writes, with the
allocator of `headroom plan`. Exits with 1 where its peaks are others than those certified."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from headroom_rehearsal.certificate import Verified, verify

from .._core.sizes import format_bytes
from ..reports.rehearsal import VERDICTS
from .output import print_json

HELP = "replay the certificate of a rehearsal"


def add_arguments(command: argparse.ArgumentParser) -> None:
    what = "a certificate of headroom rehearse"
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help=what)


def run(options: argparse.Namespace) -> int:
    found = {path: verify(path) for path in options.files}
    if options.json:
        rows = [_row(path, one) for path, one in found.items()]
        print_json({"format": "headroom.verify/1", "certificates": rows})
    else:
        print("\n".join(_text(path, one) for path, one in found.items()))
    return 0 if all(one.holds for one in found.values()) else 1


def _row(path: Path, found: Verified) -> dict[str, object]:
    keys = ("program", "device", "versions", "fits", "peak_allocated", "peak_reserved")
    replayed = {"peak_allocated": found.allocated, "peak_reserved": found.reserved}
    row = {"file": str(path), "holds": found.holds, "replayed": replayed}
    return row | {key: found.report[key] for key in keys}


def _text(path: Path, found: Verified) -> str:
    report, device = found.report, found.report["device"]
    lines = [
        f"{path}: {shlex.join(report['program'])}",
        f"  on {device['name']} of {format_bytes(device['memory'])}, with torch "
        f"{report['versions'].get('torch', '?')}: {VERDICTS[report['fits']]}",
    ]
    peaks = (
        ("tensors, at most", report["peak_allocated"], found.allocated),
        ("reserved by torch, at most", report["peak_reserved"], found.reserved),
    )
    for name, certified, replayed in peaks:
        same = "the same when replayed"
        if certified != replayed:
            same = f"{replayed:,} bytes when replayed, not {certified:,}"
        lines.append(f"  {name:<28}{format_bytes(certified):>10}  {same}")
    return "\n".join(lines)
