"""How much of a GPU's memory bandwidth a number of instructions per element leaves, at most, and
what a launch is predicted to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .gpus import GPUS

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
# Of a multiprocessor, of all devices here: a quarter for the warps of each scheduler, which get
# them in steps of 256.
REGISTERS = 65536
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
    reserved: int = 1024  # bytes of shared memory that each block takes beside its own

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
        warps = 4 * (REGISTERS // 4 // of_warp)
        return min(
            self.threads // threads,
            self.blocks,
            warps // math.ceil(threads / 32),
            self.shared // max(1, shared + self.reserved),
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


def _device(
    name: str, arch: str, multiprocessors: int, clock: float, about: str, **at_once
) -> Device:
    gpu = GPUS[name]
    source = f"{gpu.source}: {gpu.bandwidth / 1e9:,.0f} GB/s; {about}"
    return Device(name, arch, multiprocessors, clock, gpu.copies, source, **at_once)


# Latencies of Hopper and Ada: Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU
# Architecture (arXiv:2402.13499); of Turing: Jia et al., Dissecting the NVidia Turing T4 GPU
# (arXiv:1903.07486).
DEVICES = [
    _device("H200", "90", 132, 1.98e9, "clock under load and copy as measured", latency=479),
    _device("H100", "90", 132, 1.98e9, "its architecture whitepaper: boost clock", latency=479),
    _device(
        "RTX 4090",
        "86",
        128,
        2.52e9,
        "boost clock",
        latency=542,
        threads=1536,
        blocks=24,
        shared=100 * 1024,
    ),
    _device(
        "T4",
        "75",
        40,
        1.59e9,
        "Turing GPU architecture: boost clock",
        latency=296,
        threads=1024,
        blocks=16,
        shared=64 * 1024,
        reserved=0,
    ),
]
