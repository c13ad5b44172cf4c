"""Tensors of the CPU over the memory of the software device, which is memory of the host."""

from __future__ import annotations

import contextlib
import functools
import warnings

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# A view is cut from one storage that spans the address space: that costs one call, and it owns
# nothing, so that no operation keeps a tensor longer than torch does.
_BEGIN = 1 << 12
_CPU = torch.device("cpu")


def _whole_memory() -> dict[torch.dtype, Tensor]:
    """Returns one tensor for each dtype over the whole address space."""
    storage = torch._C._construct_storage_from_data_pointer(_BEGIN, _CPU, (1 << 48) - _BEGIN)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental
        for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
            with contextlib.suppress(RuntimeError):  # quantized tensors
                found[dtype] = torch.empty(0, dtype=dtype, device=_CPU).set_(storage, 0, (1,), (1,))
    return found


_MEMORY = _whole_memory()
_as_strided = torch._C._VariableFunctions.as_strided


class Raw:
    """Finds the elements of a tensor again, without keeping the tensor."""

    __slots__ = ("_pointer", "_stride", "dtype", "itemsize", "lazy", "shape")

    def __init__(self, t: Tensor):
        self._pointer, self.shape, self._stride = t.data_ptr(), t.shape, t.stride()
        self.dtype, self.itemsize = t.dtype, t.itemsize
        self.lazy = (t.is_conj(), t.is_neg())

    def data_ptr(self) -> int:
        return self._pointer

    def stride(self) -> tuple:
        return self._stride

    def numel(self) -> int:
        return self.shape.numel()

    def is_conj(self) -> bool:
        return self.lazy[0]

    def is_neg(self) -> bool:
        return self.lazy[1]


class Lent:
    """Knows whether memory that a captured graph uses still belongs to it, without keeping it."""

    __slots__ = ("_begin", "_storage")

    def __init__(self, t: Tensor):
        self._storage = StorageWeakRef(t.untyped_storage())
        self._begin = t.data_ptr()

    def is_gone(self) -> bool:
        """Returns whether it was freed, and is not in the pool of a graph, which keeps it."""
        return self._storage.expired() and not any(a <= self._begin < b for a, b in _pools())


def _pools() -> list[tuple[int, int]]:
    """Returns where the segments of graphs lie."""
    stats = [
        torch._C._cuda_memoryStats(i)["segment"]["all"] for i in range(torch.cuda.device_count())
    ]
    return _pools_at(str([(s["allocated"], s["freed"]) for s in stats]))


@functools.lru_cache(1)
def _pools_at(counts: str) -> list[tuple[int, int]]:
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    ]


def host(t: Tensor | Raw) -> Tensor:
    """Returns a tensor of the CPU over the elements of ``t``, a tensor of the device."""
    if not t.numel():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    offset = (t.data_ptr() - _BEGIN) // t.itemsize
    view = _as_strided(_MEMORY[t.dtype], t.shape, t.stride(), offset)
    if t.is_neg():
        view = torch._neg_view(view)
    return view.conj() if t.is_conj() else view


def write(to: Tensor | Raw, values: Tensor, name: str) -> None:
    """Copies ``values``, of the CPU, into ``to``, and converts them to its dtype."""
    if not to.numel():  # what CUDA's kernels do not need is empty
        return
    if to.shape != values.shape:
        raise AssertionError(
            f"The software device computed a result of shape {tuple(values.shape)} for {name}, "
            f"whose CUDA code returns {tuple(to.shape)}; report this."
        )
    (host(to) if type(to) is Raw or to.is_cuda else to).copy_(values)


def extent(t: Tensor) -> tuple[int, int]:
    """Returns the address of the first element and the bytes up to the end of the last one."""
    if not t.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), (last + 1) * t.itemsize
