"""Says how much memory and how many processors this process has."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from .cgroups import cgroup_cpus, cgroup_headroom, cgroup_limit


def available(device: torch.device, held: int = 0, root: Path = Path("/")) -> int:
    """Returns the bytes that training may take on a device: what is free there, and what it has.

    Args:
        held: bytes of the model and the batch on the CPU. On CUDA all that torch holds counts.
        root: below which files of the system are read.

    Raises:
        ValueError: the system does not say; give a budget.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free = [
        size << 10
        for size in (_kibibytes(root / "proc/meminfo", "MemAvailable"),)
        if size is not None
    ]
    limit = cgroup_limit(root)
    if limit is not None:
        own = _kibibytes(root / "proc/self/status", "VmRSS") or 0
        free.append(max(0, limit - (own << 10)))
    if not free:
        raise ValueError(
            'target="speed": this system does not say how much memory is available; give budget='
        )
    return min(free) + held


def host_headroom(root: Path = Path("/")) -> dict[str, int]:
    """Returns how many bytes of host memory can still be taken, by what limits them; nothing if the
    system does not say.

    Args:
        root: below which files of the system are read.
    """
    free = _kibibytes(root / "proc/meminfo", "MemAvailable")
    found = {
        "the memory that is available": None if free is None else free << 10,
        "what the cgroup has left": cgroup_headroom(root),
    }
    return {name: size for name, size in found.items() if size is not None}


def allowed_cpus(root: Path = Path("/")) -> float:
    """Returns how many processors' time this process may take: those that it may run on, or less
    if its cgroup has a quota, such as 1.5.

    Args:
        root: below which files of the system are read.
    """
    cpus = len(os.sched_getaffinity(0))
    return min(cpus, cgroup_cpus(root) or cpus)


def _kibibytes(file: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
