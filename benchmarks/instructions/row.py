"""A loop that has a budget: which kernel, which mix of dtypes, and how long a turn may be."""

from __future__ import annotations

from dataclasses import dataclass, field

from .loops import Turn
from .model import DEVICES

# Opcodes that come with a type of 16 bits.
F16 = ("HADD2.F32", "F2F.F16", "F2FP.F16", "F2FP.PACK")


@dataclass(frozen=True)
class Row:
    """A mix of dtypes in a kernel. The numbers that change with the kernels are the last two; the
    benchmark of an op has its own rows, `BUDGETS`."""

    kernel: str
    mix: str
    traffic: float  # bytes of memory per element
    loads: float  # bytes that a thread loads per element; more than is moved where lanes share them
    stores: float
    # Elements of a turn: how many of these opcodes there are, over how many an element takes.
    marker: tuple[str, ...]
    per_element: float
    budget: dict[str, float] = field(default_factory=dict)  # instructions per element, by arch
    wanted: float | None = None  # on a Hopper GPU
    f16: bool = False
    # Not 0: of all that a thread does with so many elements of a row, from the kernel's beginning
    # to its end or in a turn of its loop over rows, not of a loop alone. There are at least so many
    # of the marker's opcodes, and of accesses those of 16 bytes count.
    whole: int = 0
    # What the symbol of the kernel's instance has, if instances of other formulas make the same
    # accesses.
    instance: str = ""

    def elements(self, turn: Turn) -> float:
        if self.whole:
            return turn.bytes("load", 16) / self.loads
        return turn.count(*self.marker) / self.per_element

    def fits(self, turn: Turn) -> bool:
        """Whether this is a turn over elements of the row's dtypes."""
        if self.whole:
            elements = self.elements(turn)
            return (
                elements == self.whole
                and turn.bytes("store", 16) == self.stores * elements
                and turn.count(*self.marker) >= self.per_element * elements
                and (turn.count(*F16) > 0) == self.f16
            )
        if turn.bytes("load") * self.stores != turn.bytes("store") * self.loads:
            return False
        elements = self.elements(turn)
        return (
            elements in POWERS_OF_TWO
            and turn.bytes("load") == self.loads * elements
            and turn.bytes("store") == self.stores * elements
            and (turn.count(*F16) > 0) == self.f16
        )


POWERS_OF_TWO = {2**n for n in range(10)}
SQRT, SQUARE, FACTOR, ADD = ("MUFU.RSQ",), ("FFMA",), ("FMUL",), ("FADD",)
LOGISTIC = ("FFMA", "MUFU")


def evenly(instructions: float) -> dict[str, float]:
    """A budget that is the same on all devices of the model."""
    return {device.arch: instructions for device in DEVICES}
