"""The loops that have a budget: those that the benchmarks name, each of its op."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from .disassembly import Instruction, Key, kernel_name
from .loops import Turn, hot_loops, whole
from .row import Row

# The budgets are what the kernels take today and 3 % for other versions of the compiler. After a
# change of a kernel `python -m benchmarks.instructions` prints what it takes now.
ROWS: list[Row] = [
    row
    for path in sorted(Path(__file__).parents[1].glob("[!_]*.py"))
    for row in getattr(importlib.import_module(f"benchmarks.{path.stem}"), "BUDGETS", ())
]


DEEPER = 20000  # ways through a kernel of which one is followed to its end


@dataclass(frozen=True)
class Found:
    """A row in the device code of one architecture."""

    row: Row
    turn: Turn
    symbol: str  # of the kernel's instance

    @property
    def elements(self) -> float:
        return self.row.elements(self.turn)

    @property
    def instructions(self) -> float:
        return len(self.turn.instructions) / self.elements

    @property
    def branches(self) -> float:
        return self.turn.branches / self.elements

    @property
    def rank(self) -> tuple[float, float]:
        return -self.elements, self.instructions


def find(code: dict[Key, list[Instruction]]) -> dict[tuple[str, str, str], Found]:
    """Returns the main loop of each row: {(arch, kernel, mix): Found}.

    That is the one with most elements per turn, because others do what is left of a tensor, and of
    those the shortest, because a loop for any mix of dtypes fits rows that have an instance too. A
    number of elements that is no power of two comes from a way through a loop in the loop.
    """
    found: dict[tuple[str, str, str], Found] = {}
    kernels = {row.kernel for row in ROWS}
    whole_too = {row.kernel for row in ROWS if row.whole}
    for (arch, symbol), instructions in code.items():
        if (name := kernel_name(symbol)) not in kernels:
            continue
        if name in whole_too:  # longer ways are wanted than the shortest
            loops = hot_loops(instructions, DEEPER) + whole(instructions, DEEPER)
        else:
            loops = hot_loops(instructions)
        for turn in (turn for loop in loops for turn in loop):
            for row in (row for row in ROWS if row.kernel == name and row.instance in symbol):
                if not row.fits(turn):
                    continue
                key, fresh = (arch, name, row.mix), Found(row, turn, symbol)
                if key not in found or fresh.rank < found[key].rank:
                    found[key] = fresh
    return found
