"""Finds the limit of memory that the system sets for this process.

This file imports nothing but the standard library: ``headroom doctor`` also runs where the package
cannot be imported, and then loads it by its path.
"""

from __future__ import annotations

from pathlib import Path

UNLIMITED = 1 << 60  # what cgroup v1 writes for no limit is near 2**63


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Returns the smallest limit of memory, in bytes, of the cgroup of this process and of those
    that it is in; None if there is none. Knows versions 1 and 2.

    Args:
        root: below which files of the system are read.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        number, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
        if number == "0" and not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host, and the limit at the top is ours.
        folder = base / path.strip("/")
        while True:
            try:
                text = (folder / name).read_text().strip()
                limits += [int(text)] if text.isdigit() and int(text) < UNLIMITED else []
            except OSError:
                pass
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return min(limits, default=None)
