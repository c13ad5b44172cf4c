"""Refuses tensors that a state file does not hold, and reads the memory of the others."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..._core.overlap import is_freed, spanned_bytes
from . import layout


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raises TypeError for a tensor that is not dense or has a dtype that the file lacks, and
    ValueError for one whose memory has been freed."""
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"'{name}' is a DTensor: a state file holds whole tensors. Save sharded states with "
            "torch.distributed.checkpoint, or gather them first with "
            "torch.distributed.checkpoint.state_dict and full_state_dict=True"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"'{name}' is a {type(tensor).__name__}, which wraps other tensors; save those"
        )
    if tensor.is_nested:
        raise TypeError(f"'{name}' is a nested tensor; save the list of tensors of its unbind()")
    if tensor.layout != torch.strided:
        raise TypeError(f"'{name}' is sparse ({tensor.layout}); save tensor.to_dense()")
    if tensor.device.type == "meta":
        raise TypeError(f"'{name}' is on the meta device and has no values to save")
    if tensor.is_complex():
        raise TypeError(f"'{name}' is complex; save torch.view_as_real of it")
    if tensor.dtype not in layout.NAMES:
        raise TypeError(f"'{name}' is {tensor.dtype}, which safetensors files do not hold")
    if tensor.dim() > layout.MOST_DIMS:
        raise TypeError(f"'{name}' has {tensor.dim()} dimensions; save tensor.flatten()")
    check_storage(tensor, name)


def check_storage(tensor: Tensor, name: str) -> None:
    """Raises for a tensor without values, or one whose memory has been freed."""
    storage = tensor.untyped_storage()
    if tensor.numel() and storage.device.type != tensor.device.type:
        raise TypeError(f"'{name}' is a {type(tensor).__name__}, which has no values")
    if is_freed(tensor):
        raise ValueError(
            f"the storage of '{name}' has {storage.nbytes():,} bytes, and the tensor lies in "
            f"{spanned_bytes(tensor):,}: it has been freed or resized, as by "
            "untyped_storage().resize_(0); give it memory again first"
        )


def identity(tensor: Tensor) -> Any:
    """Returns a key that is equal for tensors that view the same memory in the same way."""
    if not tensor.numel():
        return id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_neg(),
    )


def strides_to_keep(tensor: Tensor) -> list[int] | None:
    """Returns the strides of a tensor whose memory is dense in another order than that of its
    indices, and None for any other."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    return list(tensor.stride())


def in_index_order(tensor: Tensor) -> Tensor:
    """Returns the values on the CPU, in the order of their indices. Copies only if it must."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, for reading and writing."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
