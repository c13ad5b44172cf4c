"""Measures the norm of gradients over all their devices and ranks, and whether all are finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from .._core.dtensor import local_part, shard_groups
from .._core.grouping import grouped
from .._core.registration import FLOATS
from .._core.table import table_of
from ..functional.unscale_norm import run


@dataclass
class Measured:
    """Holds the results of :func:`measure`, on the device of the first gradient."""

    norm: Tensor  # float32, 0-dim
    found_inf: Tensor  # float32, 0-dim: 1 if any gradient on any rank is infinite or NaN, else 0
    clip_coef: Tensor  # float32, 0-dim: the factor that clips to max_norm
    culprits: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)

    def culprit(self) -> int | None:
        """Returns the position of the first gradient on this rank that is not finite, or None.
        Waits for the device."""
        found = [where[i] for where, index in self.culprits if (i := int(index)) >= 0]
        return min(found) if found else None


@torch.no_grad()
def grad_norm(params_or_grads: Tensor | Iterable[Tensor], norm_type: float | str = 2.0) -> Tensor:
    """Returns the norm of gradients as one vector, and changes none.

    Reads each gradient once. Gradients that the kernels do not support (float64, sparse, complex)
    and norms of order 0 or below are passed on to :func:`torch.nn.utils.get_total_norm`.

    Example::

        model(torch.randn(4, 3)).square().mean().backward()
        print(headroom.grad_norm(model.parameters()))

    Args:
        params_or_grads: parameters, whose ``.grad`` counts (those without one are left out), or
            gradients. A parameter is an ``nn.Parameter``, or a leaf tensor that requires grad.
            DTensors count with all their shards on all ranks, and every rank must call. A gradient
            given twice counts once.
        norm_type: order of the norm, ``"inf"`` and ``math.inf`` included.

    Returns:
        The norm: 0-dim, on the device of the first gradient, never a DTensor, and float32 (what is
        passed on to torch has the dtype of the gradients). Of no gradients it is 0, on the CPU.

    Raises:
        TypeError: an argument is no tensor and no iterable of tensors.
    """
    norm_type = float(norm_type)
    grads = _gradients(params_or_grads)
    table = table_of((grads,)) if grads and norm_type > 0 else None
    if table is None and not (norm_type > 0 and all(map(is_ours, grads))):
        valued = with_values(grads)
        if grads and not valued:
            return zero_norm(grads[0])
        norm = get_total_norm(valued, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    return measure(grads, p=norm_type, table=table).norm


def _gradients(params_or_grads: Any) -> list[Tensor]:
    wanted = "grad_norm() wants parameters or gradients: a tensor or an iterable of tensors"
    if isinstance(params_or_grads, Tensor):
        params_or_grads = [params_or_grads]
    if isinstance(params_or_grads, torch.nn.Module):
        raise TypeError(f"{wanted}, got a module; give its parameters()")
    if not isinstance(params_or_grads, Iterable) or isinstance(params_or_grads, (str, bytes)):
        raise TypeError(f"{wanted}, got {type(params_or_grads).__name__}")
    grads: dict[int, Tensor] = {}
    for index, tensor in enumerate(listed(params_or_grads, "their norm is 0", stacklevel=5)):
        if not isinstance(tensor, Tensor):
            advice = "; named_parameters() gives pairs, parameters() tensors"
            raise TypeError(
                f"{wanted}, but item {index} is a {type(tensor).__name__}"
                f"{advice if isinstance(tensor, tuple) else ''}"
            )
        is_param = isinstance(tensor, torch.nn.Parameter) or (
            tensor.requires_grad and tensor.is_leaf
        )
        grad = tensor.grad if is_param else tensor
        if grad is not None:
            grads[id(grad)] = grad
    return list(grads.values())


def listed(tensors: Iterable[Tensor], what: str, stacklevel: int) -> list[Tensor]:
    """Returns tensors as a list. Warns if a generator has none, as one that was used before."""
    found = list(tensors)
    if isinstance(tensors, GeneratorType) and not found:
        words = f"the parameters are an empty generator, {what}; give a list to use it twice"
        warnings.warn(words, stacklevel=stacklevel)
    return found


def with_values(grads: Iterable[Tensor]) -> list[Tensor]:
    """Returns the gradients that have values: torch refuses some norms of others."""
    return [g for g in grads if (g.numel() if g.layout == torch.strided else g._nnz())]


def zero_norm(grad: Tensor) -> Tensor:
    """Returns the norm of a gradient without values, in the dtype that torch gives it."""
    return torch.zeros((), dtype=grad.dtype.to_real(), device=grad.device)


def is_ours(grad: Tensor) -> bool:
    """Returns whether the kernels measure a gradient of this dtype and layout."""
    return grad.dtype in FLOATS and grad.layout == torch.strided


def _summed(grad: Tensor) -> Tensor:
    # The norm of a sum does not follow from the norms of its terms.
    if not isinstance(grad, DTensor) or not any(p.is_partial() for p in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in grad.placements]
    )


def are_local(tensors: Iterable[Tensor]) -> bool:
    """Returns whether all tensors lie on one device and none is a DTensor. Quick for thousands of
    small tensors."""
    tensors = list(tensors)
    return len(set(map(attrgetter("device"), tensors))) <= 1 and not any(
        issubclass(kind, DTensor) for kind in set(map(type, tensors))
    )


def _buckets(grads: Sequence[Tensor]) -> dict[tuple, list[int]]:
    """Returns the positions of gradients that one call can measure, by their device and by the
    groups of their shards."""
    return grouped(range(len(grads)), lambda i: (grads[i].device, *shard_groups(grads[i])))


def measure(
    grads: Sequence[Tensor],
    *,
    p: float = 2.0,
    max_norm: float = math.inf,
    grad_scale: Tensor | None = None,
    table: Tensor | None = None,
) -> Measured:
    """Measures the norm of gradients over all their devices and ranks, and whether all are finite.

    Reads each gradient once and writes none. A DTensor counts with all its shards, so the result is
    the same on every rank, and every rank must call. ``grad_scale`` divides the gradients. Passing
    the ``table`` of the gradients, if the caller has one, saves time.
    """
    if not grads:
        return Measured(*(torch.tensor(x, dtype=torch.float32) for x in (0.0, 0.0, 1.0)))
    home = grads[0].device
    if table is not None or are_local(grads):
        buckets = {(home,): range(len(grads))}
    else:
        grads = [_summed(grad) for grad in grads]
        buckets = _buckets(grads)
    parts, culprits = [], []
    for (device, *groups), where in buckets.items():
        norm, found_inf, clip = (
            torch.zeros((), dtype=torch.float32, device=device) for _ in range(3)
        )
        culprit = torch.full((), -1, dtype=torch.int64, device=device)
        run(
            False,
            grads if table is not None else [local_part(grads[i]) for i in where],
            table,
            norm=norm,
            found_inf=found_inf,
            culprit=culprit,
            clip=clip,
            grad_scale=None if grad_scale is None else grad_scale.to(device, torch.float32),
            p=p,
            max_norm=max_norm,
        )
        culprits.append((where, culprit))
        if groups:
            norm, found_inf = _over_ranks(norm, found_inf, p, groups)
        elif len(buckets) == 1:
            return Measured(norm, found_inf, clip, culprits)
        parts.append((norm.to(home).double(), found_inf.to(home)))
    norm = torch.linalg.vector_norm(torch.stack([part[0] for part in parts]), p)
    found_inf = torch.stack([part[1] for part in parts]).amax()
    return Measured(norm.float(), found_inf, clip_coef(norm, max_norm).float(), culprits)


def clip_coef(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor that clips gradients of this norm, as :mod:`torch.nn.utils` does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _over_ranks(
    norm: Tensor, found_inf: Tensor, p: float, groups: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """Combines norms (in float64) and flags of ranks that hold different shards."""
    norm, found = norm.double(), found_inf.double()
    if math.isinf(p):
        # A maximum may lose a NaN, so it travels as a flag of its own.
        packed = torch.stack([norm.nan_to_num(posinf=math.inf), norm.isnan().double(), found])
        op = torch.distributed.ReduceOp.MAX
    else:
        packed = torch.stack([norm**p, found])
        op = torch.distributed.ReduceOp.SUM
    for group in groups:
        torch.distributed.all_reduce(packed, op, group)
    if math.isinf(p):
        norm = packed[0].masked_fill(packed[1] > 0, math.nan)
    else:
        norm = packed[0] ** (1 / p)
    return norm, (packed[-1] != 0).float()


def any_rank(flags: dict[torch.device, Tensor], groups: Iterable[Any]) -> None:
    """Sets every flag if any is set, here or on a rank of the groups. Every rank must call."""
    if not flags:
        return
    first = next(iter(flags.values()))
    found = torch.stack([flag.to(first.device) for flag in flags.values()]).amax()
    for group in groups:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    for flag in flags.values():
        flag.copy_(found)
