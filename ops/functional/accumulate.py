"""Adds gradients to float32 sums: the op ``headroom::accumulate_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.registration import FLOATS, complete, require

__all__ = ["accumulate_"]


def accumulate_(
    sums: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    losts: Sequence[Tensor] = (),
    factor: float | Tensor = 1.0,
    zero_grads: bool = False,
) -> None:
    """Adds ``factor * grad`` to float32 buffers, for a whole list at once.

    Args:
        sums: float32 tensors of any shapes and strides, on one device; written.
        grads: float32, bfloat16 or float16 tensors of the same shapes, on the same device; written
            only if ``zero_grads``.
        losts: float32 tensors like ``sums``, zeros at first: with them the sum is compensated
            (Kahan) and its error does not grow with the number of additions.
        factor: a number, or a float32 tensor of one element on that device.
        zero_grads: leave zeros in ``grads``.

    Raises:
        RuntimeError: an argument does not fit, or a tensor requires grad outside
            ``torch.no_grad()``; nothing has been written then.

    Rounding and source are documented at ``hr_accumulate`` in ``headroom.h``.
    """
    sums, losts, grads = list(sums), list(losts), list(grads)
    if len(grads) != len(sums):
        raise RuntimeError(f"grads has {len(grads)} tensors, but sums has {len(sums)}")
    if not sums:
        return
    number = {"factor_tensor": factor} if isinstance(factor, Tensor) else {"factor": factor}
    torch.ops.headroom.accumulate_(sums, losts, grads, **number, zero_grads=zero_grads)


@torch.library.register_fake("headroom::accumulate_")
def _(sums, losts, grads, *, factor=1.0, factor_tensor=None, zero_grads=False):
    require(len(grads) == len(sums), f"grads has {len(grads)} tensors, but sums has {len(sums)}")
    require(len(losts) in (0, len(sums)), f"losts has {len(losts)} tensors, sums {len(sums)}")
    dtypes = {"sums": FLOATS[:1], "losts": FLOATS[:1], "grads": FLOATS}
    for name, tensors in {"sums": sums, "losts": losts, "grads": grads}.items():
        for k, (tensor, total) in enumerate(zip(tensors, sums)):
            one = f"{name}[{k}]"
            require(tensor.shape == total.shape, f"{one} has another shape than sums[{k}]")
            require(tensor.device == sums[0].device, f"{one} is on {tensor.device}")
            require(tensor.dtype in dtypes[name], f"{one} is {tensor.dtype}, not {dtypes[name]}")
    if factor_tensor is not None:
        require(
            factor_tensor.dtype == torch.float32
            and factor_tensor.numel() == 1
            and all(factor_tensor.device == total.device for total in sums[:1]),
            "factor_tensor must be a float32 tensor of one element, on the device of sums[0]",
        )


complete("accumulate_", lambda given: set() if given.get("zero_grads") else {"grads"})
