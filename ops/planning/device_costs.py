"""What a GPU takes besides the tensors: the CUDA context, and cuBLAS's scratch memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["BlasWorkspaces", "Context", "blas_workspaces", "context"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Context:
    """An estimate of the bytes that the CUDA context of a process takes, outside the allocator.

    Attributes:
        bytes: driver, stacks of the multiprocessors and the kernels of torch loaded so far. Grows
            by what NCCL, cuDNN and others load.
        source: where the number is from.
    """

    bytes: int
    source: str


# Reports differ by the driver and by what was loaded before the reading; one reading per row.
_OLDER = Context(274 * MIB, "torch 1.13 and lazy loading, pytorch pull request 86509")
_AMPERE = Context(400 * MIB, "CUDA >= 11.7 and lazy loading, pytorch issue 109888")
_ADA = Context(426 * MIB, "RTX 6000 Ada, torch 2.10, CUDA 13.0: unsloth-zoo pull request 1053")
_NEWER = Context(512 * MIB, "assumed: more multiprocessors than the 426 MiB read on Ada")


def context(capability: tuple[int, int]) -> Context:
    """Returns the estimated cost of a CUDA context on a GPU of a compute capability."""
    if capability >= (9, 0):
        return _NEWER
    if capability >= (8, 9):
        return _ADA
    return _AMPERE if capability >= (8, 0) else _OLDER


@dataclass(frozen=True)
class BlasWorkspaces:
    """Bytes that torch allocates, through its allocator, for cuBLAS and cuBLASLt to work in.

    Attributes:
        cublas: for each matrix product by cuBLAS.
        cublaslt: for each matrix product by cuBLASLt, such as ``addmm`` with a fused bias.
        kept: whether they stay allocated after the first product, for each stream, instead of
            living during a product.
    """

    cublas: int
    cublaslt: int
    kept: bool

    @property
    def bytes(self) -> int:
        """What is live at once at most on one stream: torch lets cuBLASLt use cuBLAS's where they
        are kept."""
        return max(self.cublas, self.cublaslt)


def blas_workspaces(
    capability: tuple[int, int], kept: bool = False, config: str | None = None
) -> BlasWorkspaces:
    """Returns the workspaces of a GPU of a compute capability.

    The sizes are those of ``ATen/cuda/CublasHandlePool.cpp``: 32 MiB from compute capability 9.0
    on, 8.125 MiB (``:4096:2:16:8``) before; 1 MiB for cuBLASLt.

    Args:
        kept: torch 2.15 gives workspaces back after each product unless
            ``TORCH_CUBLAS_WORKSPACE_CACHE=1``; releases before kept them.
        config: the value of ``CUBLAS_WORKSPACE_CONFIG``, if it is set.
    """
    sizes = re.findall(r":(\d+):(\d+)", config or "")
    if sizes:
        cublas = sum(int(size) * KIB * int(count) for size, count in sizes)
    else:
        cublas = 32 * MIB if capability[0] >= 9 else 8 * MIB + 128 * KIB
    return BlasWorkspaces(cublas, MIB, kept)
