"""Counts what cuBLAS takes of a CUDA device while it multiplies: fakes do not show it.

Every product of torch needs scratch memory from torch's allocator. Until 2.14 torch kept it from
one product to the next, for each thread and stream; since 2.15 it gives it back after each product,
unless ``TORCH_CUBLAS_WORKSPACE_CACHE=1``. The rules are those of ``ATen/cuda/CublasHandlePool.cpp``
and ``ATen/native/cuda/Blas.cpp``, and were compared with the allocations of torch 2.15.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Products",
    "Scratch",
    "capability",
    "cublas_workspace",
    "keeps_workspaces",
    "planned_for",
]

KIB, MIB = 1 << 10, 1 << 20
_CACHE = "TORCH_CUBLAS_WORKSPACE_CACHE"


_told: list[tuple[int, int]] = []  # by planned_for(), the innermost last


@contextmanager
def planned_for(told: tuple[int, int] | None) -> Iterator[None]:
    """Makes :func:`capability` return ``told``, unless that is None."""
    if told is None:
        yield
        return
    _told.append(told)
    try:
        yield
    finally:
        _told.pop()


def capability() -> tuple[int, int]:
    """Returns the compute capability of the device that plans are for: that which was told, of the
    current device, if this process has one in use, or 8.0."""
    if _told:
        return _told[-1]
    has_device = torch.cuda.is_initialized()  # asking would make a context
    return torch.cuda.get_device_capability() if has_device else (8, 0)


def cublas_workspace(capability: tuple[int, int], config: str | None = None) -> int:
    """Returns the bytes that torch allocates for a product by cuBLAS: 32 MiB from compute
    capability 9.0 on, 8.125 MiB (``:4096:2:16:8``) before.

    Args:
        config: the value of ``CUBLAS_WORKSPACE_CONFIG``, if it is set.
    """
    sizes = re.findall(r":(\d+):(\d+)", config or "")
    if sizes:
        return sum(int(size) * KIB * int(count) for size, count in sizes)
    return 32 * MIB if capability[0] >= 9 else 8 * MIB + 128 * KIB


def is_grouped(dtype: torch.dtype) -> bool:
    """Returns whether products of groups of rows are one kernel of CUTLASS (GroupedBlas.cpp), and
    not a product by cuBLAS for each group."""
    return dtype is torch.bfloat16 and capability()[0] in (9, 10)


def _lt_workspace() -> int:
    """Returns the bytes for a product by cuBLASLt."""
    try:
        return KIB * int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", KIB))
    except ValueError:
        return MIB


def keeps_workspaces() -> bool:
    """Returns whether torch keeps the scratch memory from one product to the next. A torch that can
    give it back says so where it describes how its size is set."""
    described = getattr(torch.backends.cuda, "blas_workspace_size", None)
    if _CACHE not in (getattr(described, "__doc__", None) or ""):
        return True
    return os.environ.get(_CACHE) == "1"


class Scratch(NamedTuple):
    """Holds the bytes that a product takes besides its result.

    Attributes:
        copies: bytes of each operand that is copied, since its layout is none of cuBLAS's.
        workspace: bytes of scratch memory.
        is_lt: whether that is cuBLASLt's.
    """

    copies: list[int]
    workspace: int
    is_lt: bool


class Products:
    """Says what the products of a plan take.

    Attributes:
        keeps: whether a workspace stays when its product has ended.
        is_shared: whether cuBLASLt's is cuBLAS's, where they stay.
    """

    def __init__(self) -> None:
        if torch.cuda.is_initialized() and hasattr(torch.backends.cuda, "cublas_workspace_size"):
            self._size = torch.backends.cuda.cublas_workspace_size()
            self._lt_size = torch.backends.cuda.cublaslt_workspace_size()
        else:
            self._size = cublas_workspace(capability(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
            self._lt_size = _lt_workspace()
        self.keeps = keeps_workspaces()
        self.is_shared = self.keeps and os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") != "0"

    def scratch(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Scratch | None:
        """Returns what an operation takes, or None of one that is no product."""
        name = func._schema.name.rstrip("_")
        first = _OPERANDS.get(name)
        if first is None or not isinstance(result, Tensor) or not result.numel():
            return None
        left, right = args[first], args[first + 1]
        if not left.numel() or not (left.is_floating_point() or left.is_complex()):
            return None
        if name == "aten::_grouped_mm" and is_grouped(left.dtype):
            return None
        copies = [x for x in (left, right) if x.dim() > 1 and not _is_matrix(x)]
        is_lt = name == "aten::_scaled_mm" or (
            func._schema.name in _WITH_LT and _goes_to_lt(func, args, kwargs, result)
        )
        size = self._lt_size if is_lt and not self.is_shared else self._size
        return Scratch([prod(x.shape) * x.element_size() for x in copies], size, is_lt)


# The products, and which of their arguments is the left operand. The right one follows it.
_OPERANDS = dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_scaled_mm", "_grouped_mm"), 0)
_OPERANDS |= dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"), 1)
_OPERANDS = {f"aten::{name}": at for name, at in _OPERANDS.items()}


def _is_matrix(x: Tensor) -> bool:
    """Returns whether cuBLAS reads the last two dimensions of a tensor where they are."""
    (rows, cols), (down, along) = x.shape[-2:], x.stride()[-2:]
    is_rows = along == 1 and down >= max(1, cols)
    is_columns = down == 1 and along >= max(1, rows)
    return is_rows or is_columns or (x.is_contiguous() and down != 0 and along != 0)


_WITH_LT = ("aten::addmm", "aten::_addmm_activation")  # not in place


def _goes_to_lt(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> bool:
    """Returns whether a product that adds something goes to cuBLASLt, which adds it meanwhile."""
    added, left, right = args[:3]
    beta = args[3] if len(args) > 3 else kwargs.get("beta", 1)
    cols = right.shape[1]
    if os.environ.get("DISABLE_ADDMM_CUDA_LT") == "1" or left.shape[1] < 2 or cols < 2:
        return False
    if added.is_contiguous() and added.dim() and added.numel() == added.shape[-1] == cols:
        return bool(beta == 1)  # a bias
    if func._schema.name == "aten::_addmm_activation":
        return bool(beta == 1)
    is_16_bit = result.dtype in (torch.bfloat16, torch.float16)
    return is_16_bit and added.shape == result.shape and added.is_contiguous() and beta != 0
