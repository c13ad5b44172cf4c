"""A call whose time is predicted: its launches, and which rows of budgets they go through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A launch of a call. The rows of budgets that it goes through give its instructions."""

    kernel: str
    rows: tuple[tuple[str, float], ...]  # (mix, elements of all threads), the first in the instance
    blocks: int
    threads: int
    waits: float
    traffic: float
    shared: int = 0  # bytes of a block that are given at the launch


@dataclass(frozen=True)
class Call:
    """A call of an op on inputs of a size; the benchmark of an op has its own, `CALLS`."""

    name: str
    least: float  # bytes that it has to move, whatever the kernels do
    steps: tuple[Step, ...]
