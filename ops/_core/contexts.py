"""What a CUDA context takes. Imports nothing, because a rehearsal asks before torch is there."""

from __future__ import annotations

MIB = 1 << 20
# By the least compute capability. Reports differ by the driver and by what was loaded before the
# reading; one reading per row.
_CONTEXTS = (
    ((9, 0), 512 * MIB, "assumed: more multiprocessors than the 426 MiB read on Ada"),
    ((8, 9), 426 * MIB, "RTX 6000 Ada, torch 2.10, CUDA 13.0: unsloth-zoo pull request 1053"),
    ((8, 0), 400 * MIB, "CUDA >= 11.7 and lazy loading, pytorch issue 109888"),
    ((0, 0), 274 * MIB, "torch 1.13 and lazy loading, pytorch pull request 86509"),
)


def context(capability: tuple[int, int]) -> tuple[int, str]:
    """Returns an estimate of the bytes that the CUDA context of a process takes outside the
    allocator, and where the number is from: of the driver, the stacks of the multiprocessors and
    the kernels of torch. It grows by what NCCL, cuDNN and others load."""
    return next((size, source) for least, size, source in _CONTEXTS if capability >= least)
