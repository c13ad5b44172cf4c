"""Says how much memory a device has for this process."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .cgroups import cgroup_limit


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


def _kibibytes(file: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
