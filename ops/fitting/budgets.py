"""How many bytes training may take."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .._core.cgroups import cgroup_limit
from .._core.sizes import parse_bytes

__all__ = ["MARGINS", "available", "budget_of", "within"]

MARGINS = {"cpu": 0.002, "cuda": 0.02}
"""The share of a budget that is left free: by which plans were wrong at the most where they were
compared with measured peaks."""

LEAST = 1024
"""Bytes. A number below it is not meant as bytes."""

UNSEEN = 16 << 10
UNSEEN_OF_BLOCK = 5056
"""Bytes that plans do not see: tables of the optimizer, and the state of the CPU's random numbers
that a block which is computed again keeps."""

FREE = {"cpu": 0.2, "cuda": 0.05}
"""The share of the free memory of a device that ``target="speed"`` leaves to everything else."""


def budget_of(
    budget: int | float | str | None, target: str | None, device: torch.device, held: int = 0
) -> int:
    """Returns the budget in bytes; ``held`` as in :func:`available`.

    Raises:
        ValueError: both or neither were given, ``target`` is unknown, or the budget is no size that
            can be meant.
    """
    if (budget is None) == (target is None):
        raise ValueError(
            f"budget is {budget!r} and target {target!r}, wanted one of them: a budget such as "
            '"6 GiB", or target="speed" for what the device has'
        )
    if budget is not None:
        size = parse_bytes(budget, "budget")
        if size < LEAST:
            raise ValueError(
                f'budget is {budget!r}, which is {size} bytes; write the unit, such as "6 GiB"'
            )
        return size
    if target != "speed":
        raise ValueError(f'target is {target!r}, wanted "speed"')
    return int((1 - FREE[device.type]) * available(device, held))


def within(budget: int, margin: float | None, device: torch.device, blocks: int) -> int:
    """Returns what a plan may take: the budget without its margin, and without what plans do not
    see.

    Args:
        margin: the share that is left free, or None for that of the device.
        blocks: how many there are.
    """
    share = MARGINS[device.type] if margin is None else margin
    return max(0, int(budget * (1 - share)) - UNSEEN - UNSEEN_OF_BLOCK * blocks)


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
