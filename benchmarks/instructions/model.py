"""How much of a GPU's memory bandwidth a number of instructions per element leaves, at most, and
what a launch is predicted to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Warp instructions that a multiprocessor issues per cycle in loops like these. The hardware's
# maximum is 4, one per scheduler.
ISSUED = 3.0
# Memory that is waited for takes about twice as long under load as alone: queues are half full.
LOADED = 2.0
# From one kernel's last block to the next one's first, in a stream that is never empty, in seconds.
GAP = 1.0e-6
# A block's beginning and end, and its barriers and shuffles, in multiples of the latency alone.
BLOCK = 1.0
# Limits that are close to each other add up: (sum of t^3)^(1/3) is 1.26 t for two that are equal.
# The exponent is a choice: measured throughputs bend below the limits where these meet (V. Volkov,
# Understanding Latency Hiding on GPUs, 2016), and how much depends on the kernel.
KNEE = 3
REGISTERS = 65536  # of a multiprocessor, of all devices here; a warp's are given in steps of 256
LEFT_OUT = (
    "Left out: the latency of loads and how many warps hide it, half sectors, bank conflicts of "
    "shared memory, pipes narrower than 32 lanes (binary64, roots, on a T4 all of binary32), what "
    "a block does before and after its loop, and launches. So the fraction is an upper bound."
)

MODEL = (
    "the time is that of memory, instructions and waiting, as they limit each other, and "
    f"{GAP * 1e6:g} us a launch;\nfraction: of the bandwidth of a copy, for the bytes that the "
    "call has to move; limit: of its longest launch."
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
    latency: float = 0.0  # cycles of a load from memory, when nothing else runs
    # Of a multiprocessor at once (CUDA C++ Programming Guide, technical specifications).
    threads: int = 2048
    blocks: int = 32
    shared: int = 228 * 1024

    def needed(self, instructions: float, traffic: float) -> float:
        """Instructions per cycle and multiprocessor with which the memory is the limit."""
        elements = self.bandwidth / traffic / (self.multiprocessors * self.clock)
        return elements * instructions / 32

    def fraction(self, instructions: float, traffic: float) -> float:
        """The share of the bandwidth that is left."""
        return min(1.0, ISSUED / self.needed(instructions, traffic))

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """How many blocks a multiprocessor holds at once, of threads that take so many registers
        and blocks that take so many bytes of shared memory."""
        of_warp = math.ceil(32 * registers / 256) * 256
        return min(
            self.threads // threads,
            self.blocks,
            REGISTERS // of_warp // math.ceil(threads / 32),
            self.shared // max(1, shared),
        )


@dataclass(frozen=True)
class Launch:
    """What one launch of a kernel does."""

    blocks: int
    threads: int
    traffic: float  # bytes of memory that it moves
    instructions: float  # of all threads
    waits: float  # times that a block waits for memory, one after another
    registers: int  # of a thread
    shared: int = 0  # bytes of a block


@dataclass(frozen=True)
class Prediction:
    """Seconds of a launch, and what they would be if only one thing were the limit."""

    memory: float
    issue: float
    latency: float  # of blocks one after another, each of which waits for what it has loaded

    @property
    def seconds(self) -> float:
        parts = self.memory, self.issue, self.latency
        return sum(part**KNEE for part in parts) ** (1 / KNEE) + GAP

    @property
    def limit(self) -> str:
        parts = {"memory": self.memory, "instructions": self.issue, "latency": self.latency}
        return max(parts, key=parts.__getitem__)


def predict(device: Device, launch: Launch) -> Prediction:
    """Returns what a launch takes.

    Latency is Little's law, said of blocks: as many as are resident at once load, wait and give way
    to the next, so that the rate they can reach is bytes in flight over the latency of a wait.
    """
    resident = device.resident(launch.threads, launch.registers, launch.shared)
    at_once = min(launch.blocks, device.multiprocessors * resident)
    waves = math.ceil(launch.blocks / at_once)
    busy = min(launch.blocks, device.multiprocessors)
    life = device.latency * (LOADED * launch.waits + BLOCK) / device.clock
    return Prediction(
        launch.traffic / device.bandwidth,
        launch.instructions / 32 / (busy * ISSUED * device.clock),
        waves * life,
    )


# Latencies of Hopper and Ada: Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU
# Architecture (arXiv:2402.13499); of Turing: Jia et al., Dissecting the NVidia Turing T4 GPU
# (arXiv:1903.07486).
# Where no copy was measured, 0.9 of the data sheet's bandwidth, as on the H200.
DEVICES = [
    Device(
        "H200",
        "90",
        132,
        1.98e9,
        4.3e12,
        "data sheet: 4.8 TB/s; multiprocessors, clock under load and copy as measured",
        latency=479,
    ),
    Device(
        "H100",
        "90",
        132,
        1.98e9,
        0.9 * 3.35e12,
        "NVIDIA H100 data sheet, SXM5: 3.35 TB/s; its architecture whitepaper: boost clock",
        latency=479,
    ),
    Device(
        "RTX 4090",
        "86",
        128,
        2.52e9,
        0.9 * 1008e9,
        "NVIDIA Ada GPU architecture, table of the GeForce RTX 4090: boost clock, 1008 GB/s",
        latency=542,
        threads=1536,
        blocks=24,
        shared=100 * 1024,
    ),
    Device(
        "T4",
        "75",
        40,
        1.59e9,
        0.9 * 320e9,
        "NVIDIA T4 data sheet and Turing GPU architecture: boost clock, 320 GB/s",
        latency=296,
        threads=1024,
        blocks=16,
        shared=64 * 1024,
    ),
]
