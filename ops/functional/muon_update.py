"""Updates parameters by orthogonal matrices, as Muon does: the op ``headroom::muon_update_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_list
from .._core.registration import complete, require
from .muon_momentum import check_updates
from .weights import check_step, op_arguments


def muon_update_(
    params: list[Tensor],
    updates: list[Tensor],
    state_steps: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    weight_decay: float = 0.1,
    scales: Sequence[float] | None = None,
    row_vars: Sequence[Tensor] = (),
    beta2: float = 0.95,
    residuals: Sequence[Tensor] = (),
    **step: Any,
) -> None:
    """Takes ``lr * scale`` of an update off each parameter, after ``lr * weight_decay`` of itself.

    The last pass of Muon. Entry k of every list belongs to parameter k; all lie on one device.

    Args:
        params: float32, bfloat16 or float16 tensors ``[rows, cols]``; updated. One that is not
            contiguous is copied for the call.
        updates: of the same shapes and any of these dtypes, as in :func:`muon_momentum_`; not
            changed.
        state_steps: float32 or float64 tensors of one element, the steps before this one; each
            grows by 1. Only stochastic rounding needs them.
        lr: learning rate; a tensor of one element is read on its device.
        scales: a factor of ``lr`` for each parameter, which does not scale the decay; 1 by default.
        row_vars: float32 tensors ``[rows]``, zeros before the first step; updated. With them the
            rows of updates are normalized, as NorMuon does, with the weight ``beta2`` of the old
            mean square in the new one.
        residuals, step: ``found_inf``, ``master``, ``rounding``, ``weight_seeds``, ``places`` and
            ``stalled``, as in :func:`adamw_`.

    Raises:
        RuntimeError: as :func:`muon_momentum_` does.

    The rule, its source and its rounding are documented at ``hr_muon_update`` in ``headroom.h``.
    """
    if params:
        torch.ops.headroom.muon_update_(
            params,
            updates,
            list(row_vars),
            list(state_steps),
            list(residuals),
            **op_arguments(params, lr, **step),
            weight_decay=weight_decay,
            beta2=beta2,
            scales=[1.0] * len(params) if scales is None else list(scales),
        )


@torch.library.register_fake("headroom::muon_update_")
def _(params, updates, row_vars, state_steps, residuals, *, scales, **options):
    check_step(params, params, state_steps, residuals, options, counts=bool(state_steps))
    check_updates(updates, params, "params")
    if row_vars:
        rows = [param.shape[0] for param in params]
        check_list("row_vars", row_vars, params, (torch.float32,), rows)
    require(len(scales) == len(params), f"scales has {len(scales)} numbers, wanted {len(params)}")


complete("muon_update_")
