"""Gathers the momentum of matrices for Muon: the op ``headroom::muon_momentum_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_list, check_scalars
from .._core.registration import FLOATS, complete, require
from .adamw8bit import BLOCK_SIZES
from .momentum import CODES


def muon_momentum_(
    grads: list[Tensor],
    moments: list[Tensor],
    updates: list[Tensor],
    squares: Tensor,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    maximize: bool = False,
    absmaxs: Sequence[Tensor] = (),
    block_size: int = 256,
    **scalars: Tensor | None,
) -> None:
    """Updates the moments of matrices, and writes what :func:`newton_schulz_` makes orthogonal.

    The first pass of Muon. Entry k of every list belongs to matrix k; all lie on one device.

    Args:
        grads: float32, bfloat16 or float16 tensors ``[rows, cols]``; not changed.
        moments: of the same shapes, float32, bfloat16 or float16, zeros before the first step; or,
            with ``absmaxs``, uint8 codes; updated. One that is not contiguous is copied for the
            call, as a gradient is.
        updates: of the same shapes, float32, bfloat16 or float16; written. The rows of each or its
            columns must be dense: a tensor ``[batch, m, n]`` has the updates of several parameters
            as views, ``x[k]`` or for one with more rows than columns ``x[k].T``.
        squares: a contiguous float32 tensor of as many elements; written: the sum of the squares of
            each update.
        absmaxs: scales of the blocks of 8-bit moments, contiguous float32 tensors of
            ``ceil(numel / block_size)`` elements, zeros before the first step; updated.
        block_size: 64, 128, 256 or 512 elements, of 8-bit moments.
        scalars: ``grad_scale``, ``found_inf`` and ``clip_coef``, as in :func:`adamw_`.

    Raises:
        RuntimeError: shapes, devices, strides or dtypes do not fit, an option is out of range, or a
            tensor requires grad outside ``torch.no_grad()`` (the op has no derivative). The message
            names the argument. Nothing has been written then.

    The rule, its source and its rounding are documented at ``hr_muon_momentum`` in ``headroom.h``.
    """
    if grads:
        torch.ops.headroom.muon_momentum_(
            grads,
            moments,
            list(absmaxs),
            updates,
            squares,
            momentum=momentum,
            nesterov=nesterov,
            maximize=maximize,
            block_size=block_size,
            **scalars,
        )


def muon_momentum8bit_(
    grads: list[Tensor],
    codes: list[Tensor],
    scales: list[Tensor],
    updates: list[Tensor],
    squares: Tensor,
    **options: Any,
) -> None:
    """Writes what :func:`muon_momentum_` writes, with moments in 8-bit ``codes`` of blocks that
    have ``scales``, its ``absmaxs``. The ``options`` are those of that function."""
    muon_momentum_(grads, codes, updates, squares, absmaxs=scales, **options)


@torch.library.register_fake("headroom::muon_momentum_")
def _(grads, moments, absmaxs, updates, squares, *, block_size=256, **options):
    check_list("grads", grads, grads, FLOATS, leader="grads")
    check_list("moments", moments, grads, CODES if absmaxs else FLOATS, leader="grads")
    check_updates(updates, grads, "grads")
    if absmaxs:
        require(
            block_size in BLOCK_SIZES, f"block_size is {block_size}, wanted one of {BLOCK_SIZES}"
        )
        blocks = [-(-grad.numel() // block_size) for grad in grads]
        check_list("absmaxs", absmaxs, grads, (torch.float32,), blocks, leader="grads")
    check_vector("squares", squares, len(grads), grads)
    check_scalars(options, grads)


def check_vector(name: str, tensor: Tensor, count: int, leaders: Sequence[Tensor]) -> None:
    """Requires a contiguous float32 tensor of ``count`` elements, on the device of the leaders."""
    require(
        tensor.dtype == torch.float32 and tensor.numel() == count and tensor.is_contiguous(),
        f"{name} must be a contiguous float32 tensor of {count} elements",
    )
    for leader in leaders[:1]:
        require(tensor.device == leader.device, f"{name} is on {tensor.device}")


def check_updates(updates: Sequence[Tensor], leaders: Sequence[Tensor], leader: str) -> None:
    """Requires updates of the shapes of the leaders, which are matrices."""
    check_list("updates", updates, leaders, FLOATS, leader=leader)
    for k, update in enumerate(updates):
        require(update.dim() == 2, f"{leader}[{k}] has {update.dim()} dimensions, wanted 2")


complete("muon_momentum_")
