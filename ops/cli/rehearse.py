"""Runs a training program for a GPU that this machine does not have, and says whether it fits."""

from __future__ import annotations

import argparse
import os
import sys

from headroom_rehearsal.command import HAS_JSON, HELP, add_arguments

__all__ = ["HAS_JSON", "HELP", "add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    """Begins this process again, without torch, before which the device has to be there."""
    words = sys.argv[sys.argv.index("rehearse") + 1 :]
    os.execv(sys.executable, [sys.executable, "-m", "headroom_rehearsal", *words])
