"""Exits with 1 unless a wheel is clean for the platform in its name, and at most 60 MB.

    python .ci/check_wheel.py dist/headroom-0.2.0-py3-none-manylinux_2_28_x86_64.whl

Prints what `auditwheel show` says of it. A clean wheel's libraries need nothing but what every
system of the platform has. libtorch.so comes with the torch that the wheel requires: it is the one
library that may be missing.
"""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

MOST_BYTES = 60_000_000


def show(wheel, *options):
    command = [sys.executable, "-m", "auditwheel", "show", *options, str(wheel)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def glibc(tag):
    """Returns the version of glibc in a platform tag, or one that no platform has."""
    found = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def faults(wheel):
    """Returns what is wrong with a wheel, in words."""
    platform = wheel.stem.rpartition("-")[2]
    report = json.loads(show(wheel, "--json"))
    missing = report["policy_upgrades"].get(platform, {})
    if set(missing.pop("libs_to_eliminate", [])) - {"libtorch.so"} or missing:
        yield f"{platform} does not have {report['policy_upgrades'][platform]}"
    if glibc(report["sym_tag"]) > glibc(platform):
        yield f"its symbols are those of {report['sym_tag']}: {report['versioned_symbols']}"
    if not {"libheadroom.so.0.2", "libheadroom_torch.so"} <= {
        Path(name).name for name in zipfile.ZipFile(wheel).namelist()
    }:
        yield "it lacks a library"
    if wheel.stat().st_size > MOST_BYTES:
        yield f"it has {wheel.stat().st_size:,} bytes, wanted at most {MOST_BYTES:,}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    print(show(path))
    if found := list(faults(path)):
        sys.exit("\n".join([f"{path}:", *found]))
    print(f"{path.name} is clean and has {path.stat().st_size / 1e6:.1f} MB")
