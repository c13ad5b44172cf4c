"""Says how tensors lie in memory: dense, side by side, or overlapping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .dtensor import local_part


def flat(tensor: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in their order in memory. It counts writes with it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns a tensor of these strides with the same elements: itself, or a copy."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def bytes_of(tensor: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """Returns the bytes of a dense tensor as a vector, in their order in memory, or in that of
    these strides."""
    tensor = tensor.detach()
    return flat(tensor if stride is None else laid_out(tensor, stride)).view(torch.uint8)


class _Span(NamedTuple):
    """Holds the bytes from the first element of a tensor to its last."""

    device: tuple[str, int]
    start: int
    stop: int
    index: int  # among the tensors


def place_in_memory(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a value that changes if the memory of a tensor, or of a DTensor's shard, does."""
    local = local_part(tensor)
    return _address(local), local.shape, local.stride() if local.layout == torch.strided else None


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Returns the positions of two tensors that have an element in common, or None. Views of one
    buffer that lie side by side, or between one another's elements, have none."""
    local = [local_part(tensor) for tensor in tensors]
    spans = sorted(span for i, tensor in enumerate(local) for span in _span(i, tensor))
    for cluster in _clusters(spans):
        if len(cluster) > 1 and (found := _overlapping_in(cluster, local)) is not None:
            return min(found), max(found)
    return None


def is_freed(tensor: Tensor) -> bool:
    """Returns whether the storage of a strided tensor is shorter than the tensor, as after
    ``untyped_storage().resize_(0)``: torch reads and writes such a tensor without a check."""
    return bool(tensor.numel()) and tensor.untyped_storage().nbytes() < spanned_bytes(tensor)


def spanned_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a strided tensor with elements needs of its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (tensor.storage_offset() + last + 1) * tensor.element_size()


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements lie side by side in memory, in any order of the dimensions.
    (torch's own function cannot be traced.)"""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != extent:
                return False
            extent *= size
    return True


def _address(tensor: Tensor) -> int:
    if tensor.layout != torch.strided or isinstance(tensor, FakeTensor):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory of its own
        return 0


def _span(index: int, tensor: Tensor) -> Iterable[_Span]:
    start = _address(tensor)
    if not start or not tensor.numel():
        return
    size = spanned_bytes(tensor) - tensor.storage_offset() * tensor.element_size()
    yield _Span((tensor.device.type, tensor.device.index or 0), start, start + size, index)


def _clusters(spans: Iterable[_Span]) -> Iterable[list[_Span]]:
    """Yields runs of sorted spans, each of which begins before all spans ahead of it have ended."""
    cluster: list[_Span] = []
    stop = 0
    for span in spans:
        if cluster and (span.device != cluster[0].device or span.start >= stop):
            yield cluster
            cluster = []
        stop = max(stop, span.stop) if cluster else span.stop
        cluster.append(span)
    yield cluster


def _overlapping_in(cluster: list[_Span], tensors: list[Tensor]) -> tuple[int, int] | None:
    dense: _Span | None = None  # the one without gaps that ends last
    for span in cluster:
        if dense is not None and span.start < dense.stop:
            return dense.index, span.index
        if is_dense(tensors[span.index]):
            dense = span
    # Some have gaps: a map of the memory holds the owner of each place.
    first, stop = cluster[0].start, max(span.stop for span in cluster)
    sizes = [tensors[span.index].element_size() for span in cluster]
    unit = math.gcd(*sizes, *(span.start - first for span in cluster))
    owners = torch.zeros((stop - first) // unit, dtype=torch.int32, device="cpu")
    for place, (span, size) in enumerate(zip(cluster, sizes), 1):
        tensor, parts = tensors[span.index], size // unit
        shape = *tensor.shape, parts
        strides = *(stride * parts for stride in tensor.stride()), 1
        mine = owners.as_strided(shape, strides, (span.start - first) // unit)
        if (other := int(mine.max())) > 0:
            return cluster[other - 1].index, span.index
        mine.fill_(place)
    return None
