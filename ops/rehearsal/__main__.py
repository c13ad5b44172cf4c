"""Rehearses a program: ``python -m headroom_rehearsal``, the same as ``headroom rehearse``."""

from __future__ import annotations

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
