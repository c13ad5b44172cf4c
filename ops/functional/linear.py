"""``x @ weight.T + bias``, by the product that is fast on this processor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.rows import autocast_dtype, check_tensors
from .._core.surroundings import takes_ops
from .gemm import gemm

# The dtypes of 16 bits that torch has no fast product for on this processor.
SLOW_ON_CPU = {
    d for d in (torch.bfloat16, torch.float16) if not torch.ops.headroom.lends_product(d)
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T + bias``: ``torch.nn.functional.linear``, but on the CPU in a dtype
    that torch has no fast product for.

    Where the processor has no instructions for products in 16 bits, torch multiplies these many
    times slower than float32. There :func:`gemm` widens small parts of the factors to float32 in
    the caches, sums in float32, rounds once, and allocates nothing but the result. Its bits depend
    on neither the number of threads nor the instruction set, but may differ from those of torch,
    which adds the terms in another order.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, of the same dtype.
        bias: ``[out]``, of the same dtype.

    Returns:
        A tensor ``[..., out]``. It has gradients of any order. Under autocast, tensors are cast as
        torch casts them.

    Raises:
        RuntimeError: an argument does not fit.
    """
    check_tensors(x=x, weight=weight)
    if not SLOW_ON_CPU or x.device.type != "cpu" or not _is_slow(x, weight, bias):
        return F.linear(x, weight, bias)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"x is {[*x.shape]} and weight {[*weight.shape]}, wanted [..., in] and [out, in]"
        )
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return gemm(rows, weight, transpose_b=True, bias=bias).view(*x.shape[:-1], weight.shape[0])


def _is_slow(*tensors: Tensor | None) -> bool:
    """Returns whether torch would multiply these slowly, and the op takes them."""
    given = [tensor for tensor in tensors if tensor is not None]
    lowered = autocast_dtype("cpu")
    if lowered is None and any(tensor.dtype != given[0].dtype for tensor in given):
        return False
    return (lowered or given[0].dtype) in SLOW_ON_CPU and all(map(takes_ops, given))


def linear_forward(module: nn.Linear, input: Tensor) -> Tensor:
    """Computes the forward of an ``nn.Linear`` by :func:`linear`."""
    return linear(input, module.weight, module.bias)
