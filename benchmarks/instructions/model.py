"""How much of a GPU's memory bandwidth a number of instructions per element leaves, at most."""

from __future__ import annotations

from dataclasses import dataclass

# Warp instructions that a multiprocessor issues per cycle in loops like these. The hardware's
# maximum is 4, one per scheduler.
ISSUED = 3.0
LEFT_OUT = (
    "Left out: the latency of loads and how many warps hide it, half sectors, bank conflicts of "
    "shared memory, pipes narrower than 32 lanes (binary64, roots, on a T4 all of binary32), what "
    "a block does before and after its loop, and launches. So the fraction is an upper bound."
)


@dataclass(frozen=True)
class Device:
    """A GPU, and which of the library's device code it runs."""

    name: str
    arch: str
    multiprocessors: int
    clock: float  # Hz, that it keeps up with this kind of work
    bandwidth: float  # bytes/s that a copy reaches
    source: str

    def needed(self, instructions: float, traffic: float) -> float:
        """Instructions per cycle and multiprocessor with which the memory is the limit."""
        elements = self.bandwidth / traffic / (self.multiprocessors * self.clock)
        return elements * instructions / 32

    def fraction(self, instructions: float, traffic: float) -> float:
        """The share of the bandwidth that is left."""
        return min(1.0, ISSUED / self.needed(instructions, traffic))


# Where no copy was measured, 0.9 of the data sheet's bandwidth, as on the H200.
DEVICES = [
    Device(
        "H200",
        "90",
        132,
        1.98e9,
        4.3e12,
        "data sheet: 4.8 TB/s; multiprocessors, clock under load and copy as measured",
    ),
    Device(
        "RTX 4090",
        "86",
        128,
        2.52e9,
        0.9 * 1008e9,
        "NVIDIA Ada GPU architecture, table of the GeForce RTX 4090: boost clock, 1008 GB/s",
    ),
    Device(
        "T4",
        "75",
        40,
        1.59e9,
        0.9 * 320e9,
        "NVIDIA T4 data sheet and Turing GPU architecture: boost clock, 320 GB/s",
    ),
]
