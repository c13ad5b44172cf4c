"""Finds the limits of memory and processors that the system sets for this process, and what is left
of the first.

This file imports nothing but the standard library: ``headroom doctor`` also runs where the package
cannot be imported, and then loads it by its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60  # what cgroup v1 writes for no limit is near 2**63


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Returns the smallest limit of memory, in bytes, of the cgroup of this process and of those
    that it is in; None if there is none. Knows versions 1 and 2.

    Args:
        root: below which files of the system are read.
    """
    return min((limit for _, limit, _ in _limits(root)), default=None)


def cgroup_headroom(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process can still take before a cgroup that it is in reaches its
    limit; None if there is no limit. Pages of files do not count as taken: the system drops them
    for whoever needs memory.

    Args:
        root: below which files of the system are read.
    """
    found = []
    for folder, limit, version in _limits(root):
        used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if used is not None:
            found.append(max(0, limit - max(0, used - _file_pages(folder, version))))
    return min(found, default=None)


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """Returns how many processors' time the cgroup of this process, and those that it is in, may
    take, such as 1.5; None if there is no limit. Knows versions 1 and 2.

    Args:
        root: below which files of the system are read.
    """
    found = []
    for folder, version in _folders(root, "cpu"):
        if version == 2:
            names = ("cpu.max",)
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            words = [word for name in names for word in (folder / name).read_text().split()]
        except OSError:
            continue
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """Yields the folder, the limit and the version of each cgroup of this process that limits its
    memory."""
    for folder, version in _folders(root, "memory"):
        limit = _number(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit is not None and limit < UNLIMITED:
            yield folder, limit, version


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yields the folder and the version of each cgroup of this process that a controller is for,
    the innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
        if number == "0" and not controllers:
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        # In a container the path may be that of the host, and the limit at the top is ours.
        folder = base / path.strip("/")
        while True:
            yield folder, version
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_pages(folder: Path, version: int) -> int:
    """Returns the bytes of the pages of files of a cgroup, without those in shared memory, which
    are on neither list."""
    names = {("" if version == 2 else "total_") + f"{kind}_file" for kind in ("active", "inactive")}
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    pairs = (line.split() for line in lines)
    return sum(int(size) for name, size in pairs if name in names)
