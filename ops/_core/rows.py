"""Helps the functions of ops on rows: dtypes under autocast, and checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registration import FLOATS
from .surroundings import is_trained


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype of ``torch.autocast`` where it is on, or None."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Returns tensors in ``dtype``, but those of another dtype than kernels take as they are."""
    return tuple(t.to(dtype) if t is not None and t.dtype in FLOATS else t for t in tensors)


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Returns tensors as ``torch.autocast`` casts the arguments of a matrix product: in its dtype
    where it is on for the device of the first, but integers and float64 as they are."""
    dtype = None if tensors[0] is None else autocast_dtype(tensors[0].device.type)
    return tensors if dtype is None else cast(dtype, *tensors)


def promoted(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in the wider of their dtypes under ``torch.autocast``, where products come in 16
    bits and their sums with others in 32; elsewhere as they are, for the op to check.
    """
    if x.dtype == other.dtype or autocast_dtype(x.device.type) is None:
        return x, other
    dtype = torch.promote_types(x.dtype, other.dtype)
    return x.to(dtype), other.to(dtype)


def check_tensors(**tensors: Any) -> None:
    """Raises where an argument that must be a tensor is something else."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            got = "None" if tensor is None else f"a {type(tensor).__name__}"
            raise TypeError(f"{name} is {got}, wanted a tensor")


def constant_factors(factors: Tensor | None, name: str) -> Tensor | None:
    """Returns an argument that gets no gradient, in float32.

    Raises:
        RuntimeError: it requires grad, or is complex.
    """
    if factors is None:
        return None
    check_tensors(**{name: factors})
    if factors.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires grad, but gets no gradient; detach it")
    if factors.is_complex():
        raise RuntimeError(f"{name} has dtype {factors.dtype}, wanted real numbers")
    return factors.float()


def refuse_leaf(logits: Tensor, name: str) -> None:
    """Raises where a gradient over the logits, an argument of this name, would change a leaf."""
    if is_trained(logits):
        raise ValueError(
            f"inplace_backward=True would write the gradient over {name}, which is a leaf that "
            "requires grad, or a view of one; leave it out"
        )
