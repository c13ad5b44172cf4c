"""Unscales, checks and measures gradients in one pass: the ops ``headroom::unscale_norm_`` and
``headroom::grad_norm``, and :func:`measure` for gradients on several devices and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .._core.registration import FLOATS, complete, require
from .._core.table import table_of

__all__ = ["Measured", "grad_norm", "measure", "unscale_norm_"]


def unscale_norm_(
    grads: Sequence[Tensor],
    *,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
    found_inf: Tensor | None = None,
    culprit: Tensor | None = None,
    clip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    p: float = 2.0,
    max_norm: float = 0.0,
) -> None:
    """Multiplies gradients by ``clip_coef / grad_scale`` in place and measures the result.

    Args:
        grads: float32, bfloat16 or float16 tensors of any shapes and strides on one device; written
            unless the factor is 1.
        norm, norms, found_inf, clip: float32 outputs on that device, of 1, ``len(grads)``, 1 and 1
            elements; an output that is left out is not computed. ``found_inf`` becomes 1 if a
            result is infinite or NaN and does not change otherwise; ``clip`` becomes
            ``min(1, max_norm / (norm + 1e-6))``.
        culprit: int64 output of one element: the first gradient with such a result, or -1.
        grad_scale, clip_coef: float32 tensors of one element on that device.
        p: order of the norms, > 0 or infinite.
        max_norm: for ``clip``.

    Raises:
        RuntimeError: an argument does not fit, or a tensor requires grad outside
            ``torch.no_grad()``; nothing has been written then.

    With an empty list nothing is written. Rounding and order are documented at ``hr_unscale_norm``
    in ``headroom.h``.
    """
    _run(
        True,
        grads,
        norm=norm,
        norms=norms,
        found_inf=found_inf,
        culprit=culprit,
        clip=clip,
        grad_scale=grad_scale,
        clip_coef=clip_coef,
        p=p,
        max_norm=max_norm,
    )


def grad_norm(
    grads: Sequence[Tensor],
    *,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
    found_inf: Tensor | None = None,
    culprit: Tensor | None = None,
    clip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    p: float = 2.0,
    max_norm: float = 0.0,
) -> None:
    """:func:`unscale_norm_` that measures and leaves the gradients as they are."""
    _run(
        False,
        grads,
        norm=norm,
        norms=norms,
        found_inf=found_inf,
        culprit=culprit,
        clip=clip,
        grad_scale=grad_scale,
        clip_coef=clip_coef,
        p=p,
        max_norm=max_norm,
    )


def _run(write: bool, grads: Sequence[Tensor], table: Tensor | None = None, **options: Any) -> None:
    if isinstance(grads, Tensor):
        raise TypeError("grads must be a list of tensors, got a Tensor")
    grads = list(grads)
    if not grads:
        return
    outputs = [options.get(name) for name in ("norm", "norms", "found_inf", "culprit", "clip")]
    written = [tensor for tensor in outputs if tensor is not None]
    if table is None and not (
        torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), (*grads, *written)))
    ):
        table = table_of((grads,))
    if table is None:
        op = torch.ops.headroom.unscale_norm_ if write else torch.ops.headroom.grad_norm
        op(grads, **options)
        return
    torch.autograd.graph.increment_version([*grads, *written] if write else written)
    name = "_unscale_norm_table_" if write else "_grad_norm_table"
    getattr(torch.ops.headroom, name)(grads[0], table, **options)


def multiply_(grads: Sequence[Tensor], factor: Tensor, table: Tensor | None = None) -> None:
    """Multiplies gradients by a float32 tensor of one element; a factor of 1 writes nothing."""
    _run(True, grads, table, clip_coef=factor)


def _fake(grads: Sequence[Tensor], **options: Any) -> None:
    for k, grad in enumerate(grads):
        require(grad.dtype in FLOATS, f"grads[{k}] has dtype {grad.dtype}, wanted one of {FLOATS}")
        require(grad.device == grads[0].device, f"grads[{k}] is on {grad.device}")
    sizes = {"norms": len(grads)}
    for name, tensor in options.items():
        if not isinstance(tensor, Tensor) or not grads:
            continue
        dtype, numel = torch.int64 if name == "culprit" else torch.float32, sizes.get(name, 1)
        require(
            tensor.dtype == dtype and tensor.numel() == numel and tensor.device == grads[0].device,
            f"{name} must be a {dtype} tensor of {numel} elements on {grads[0].device}",
        )


for _name in ("unscale_norm_", "grad_norm"):
    torch.library.register_fake(f"headroom::{_name}")(_fake)
    complete(_name)


@dataclass
class Measured:
    """What :func:`measure` found, on the device of the first gradient, without waiting for it."""

    norm: Tensor  # float32, 0-dim
    found_inf: Tensor  # float32, 0-dim: 1 if any gradient on any rank is infinite or NaN, else 0
    clip_coef: Tensor  # float32, 0-dim: the factor that clips to max_norm
    culprits: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)

    def culprit(self) -> int | None:
        """The first gradient on this rank that is not finite, or None. Waits for the device."""
        found = [where[i] for where, index in self.culprits if (i := int(index)) >= 0]
        return min(found) if found else None


def shard_groups(grad: Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold different shards of a gradient."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(grad.placements) if not p.is_replicate())


def local_part(grad: Tensor) -> Tensor:
    """Returns the shard of a DTensor on this rank, and any other tensor unchanged."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _summed(grad: Tensor) -> Tensor:
    # The norm of a sum is not that of the summands.
    if not isinstance(grad, DTensor) or not any(p.is_partial() for p in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in grad.placements]
    )


def is_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether all lie on one device and none is a DTensor. Cheap for thousands of small tensors."""
    tensors = list(tensors)
    return len(set(map(attrgetter("device"), tensors))) <= 1 and not any(
        issubclass(kind, DTensor) for kind in set(map(type, tensors))
    )


def _buckets(grads: Sequence[Tensor]) -> dict[tuple, list[int]]:
    """Groups gradients that one call can measure: by device and by the groups of their shards."""
    buckets: dict[tuple, list[int]] = {}
    for i, grad in enumerate(grads):
        buckets.setdefault((grad.device, *shard_groups(grad)), []).append(i)
    return buckets


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
    if table is not None or is_plain(grads):
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
        _run(
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
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return Measured(norm.float(), found_inf, clip.float(), culprits)


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
