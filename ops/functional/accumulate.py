"""Adds gradients to float32 sums: the op ``headroom::accumulate_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.list_ops import list_op
from .._core.registration import FLOATS


def accumulate_(
    sums: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    compensations: Sequence[Tensor] = (),
    factor: float | Tensor = 1.0,
    zero_grads: bool = False,
) -> None:
    """Adds ``factor * grad`` to float32 buffers, for a whole list at once.

    Args:
        sums: float32 tensors of any shapes and strides, on one device; written.
        grads: float32, bfloat16 or float16 tensors of the same shapes, on the same device; written
            only if ``zero_grads``.
        compensations: float32 tensors like ``sums``, zeros at first, for what additions lose
            (Kahan): with them the error does not grow with the number of additions.
        factor: a number, or a float32 tensor of one element on that device.
        zero_grads: leave zeros in ``grads``.

    Raises:
        RuntimeError: an argument does not fit, or a tensor requires grad outside
            ``torch.no_grad()``; nothing has been written then.

    Rounding and source are documented at ``hr_accumulate`` in ``headroom.h``.
    """
    sums, compensations, grads = list(sums), list(compensations), list(grads)
    if len(grads) != len(sums):
        raise RuntimeError(f"grads has {len(grads)} tensors, but sums has {len(sums)}")
    if not sums:
        return
    number = {"factor_tensor": factor} if isinstance(factor, Tensor) else {"factor": factor}
    torch.ops.headroom.accumulate_(sums, compensations, grads, **number, zero_grads=zero_grads)


list_op(
    "accumulate_",
    {"sums": FLOATS[:1], "compensations": FLOATS[:1], "grads": FLOATS},
    may_be_empty={"compensations"},
    scalars={"factor_tensor"},
    spared=lambda given: set() if given.get("zero_grads") else {"grads"},
)
