"""Runs a program on the software device: ``python -m headroom_rehearsal [options] script.py``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from . import start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headroom_rehearsal", description=__doc__)
    parser.add_argument("--gpu", default="H100", help='such as "RTX 4090"; default: H100')
    parser.add_argument("--memory", type=int, help="bytes of the device, instead of that GPU's")
    parser.add_argument("--capability", type=int, help="such as 86, instead of that GPU's")
    parser.add_argument("--devices", type=int, default=1, help="how many devices; default: 1")
    parser.add_argument("--computed", type=int, help="bytes up to which tensors have values")
    parser.add_argument("--headroom", type=Path, help="libheadroom for this device")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = vars(parser.parse_args())
    script, arguments = given.pop("script"), given.pop("arguments")
    start(given.pop("gpu"), **given)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
