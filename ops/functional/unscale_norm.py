"""Unscales, checks and measures gradients in one pass: the ops ``headroom::unscale_norm_`` and
``headroom::grad_norm``."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._core.registration import FLOATS, complete, require
from .._core.table import table_of


def unscale_norm_(grads: Sequence[Tensor], **options: Any) -> None:
    """Multiplies gradients by ``clip_coef / grad_scale`` in place and measures the result.

    Args:
        grads: float32, bfloat16 or float16 tensors of any shapes and strides on one device; written
            unless the factor is 1.
        options: none of them is needed:

            - norm, norms, found_inf, clip: float32 outputs on that device, of 1, ``len(grads)``, 1
              and 1 elements; outputs that are left out are not computed. ``found_inf`` becomes 1 if
              a result is infinite or NaN and does not change otherwise; ``clip`` becomes
              ``min(1, max_norm / (norm + 1e-6))``.
            - culprit: int64 output of one element: the number of the first gradient with a result
              that is infinite or NaN, or -1.
            - grad_scale, clip_coef: float32 tensors of one element on that device.
            - p: order of the norms, > 0 or infinite; 2 by default.
            - max_norm: the limit of ``clip``, 0 by default.

    Raises:
        RuntimeError: an argument does not fit, or a tensor requires grad outside
            ``torch.no_grad()``; nothing has been written then.

    With an empty list nothing is written. Rounding and order are documented at ``hr_unscale_norm``
    in ``headroom.h``.
    """
    run(True, grads, **options)


def grad_norm(grads: Sequence[Tensor], **options: Any) -> None:
    """Measures what :func:`unscale_norm_` measures, whose arguments it takes, and leaves the
    gradients as they are."""
    run(False, grads, **options)


def run(write: bool, grads: Sequence[Tensor], table: Tensor | None = None, **options: Any) -> None:
    """Runs the op that writes the gradients or the op that only measures, through a table of their
    addresses if one can be made."""
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
    run(True, grads, table, clip_coef=factor)


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
