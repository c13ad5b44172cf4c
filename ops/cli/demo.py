"""Runs the memory ladder of the examples: a small GPT in plain torch, and with more and more of
Headroom. What follows DEMO is passed on, such as --size tiny."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .output import print_json

HELP = "run the demo, in a clone of the repository"
WHERE = (
    "the demo is in the repository, not in the installed package: clone the repository that you "
    "installed from, and there run `bash examples/demo.sh` or `headroom demo`"
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.epilog = "Arguments that are not listed here are those of examples/demo.sh."


def run(options: argparse.Namespace) -> int:
    script = find_script(Path.cwd())
    if script is None:
        raise ValueError(WHERE)
    command = ["bash", str(script), *options.arguments]
    sys.stdout.flush()
    # With --json, standard output is for the JSON alone.
    code = subprocess.run(command, stdout=2 if options.json else None).returncode
    if options.json:
        print_json({"format": "headroom.demo/1", "command": command, "exit_code": code})
    return 0 if code == 0 else 1


def find_script(folder: Path) -> Path | None:
    """Returns the script of the demo, of the clone that a folder is in or that the package is
    installed from, or None."""
    for root in (folder, *folder.parents, Path(__file__).resolve().parents[2]):
        script = root / "examples" / "demo.sh"
        if script.is_file() and (root / "capi" / "headroom.h").is_file():
            return script
    return None
