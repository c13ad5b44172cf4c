"""``x @ weight.T + bias``: a product of :func:`headroom.functional.gemm` as layers call it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.registration import FLOATS
from .._core.rows import autocast_dtype, check_tensors
from .._core.surroundings import takes_ops
from .gemm import gemm

__all__ = ["SLOW_ON_CPU", "linear", "linear_forward"]

# The dtypes that torch has no fast product for on this processor.
SLOW_ON_CPU = {d for d in FLOATS if not torch.ops.headroom.lends_product(d)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does, summed in float32
    and rounded once.

    On a CPU whose instructions multiply 16 bits it is torch's product. Where there are none for the
    dtype, torch multiplies many times slower than in float32; this widens small parts of the
    factors to float32 in the caches, and allocates nothing but the result. The bits of that depend
    on neither the number of threads nor the instruction set, but may differ from torch's, whose
    order of the terms is another.

    Args:
        x: float32, bfloat16 or float16 ``[..., in]``.
        weight: ``[out, in]``, of the same dtype.
        bias: ``[out]``, of the same dtype.

    Returns:
        A contiguous tensor ``[..., out]``. It has gradients of any order. Under autocast, tensors
        are cast as ``torch.nn.functional.linear`` casts them.

    Raises:
        RuntimeError: an argument does not fit, or a CUDA tensor was given and there is no
            cuBLASLt.

    The formula is documented at ``hr_gemm`` in ``headroom.h``.
    """
    check_tensors(x=x, weight=weight)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"x is {[*x.shape]} and weight {[*weight.shape]}, wanted [..., in] and [out, in]"
        )
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return gemm(rows, weight, transpose_b=True, bias=bias).view(*x.shape[:-1], weight.shape[0])


def linear_forward(module: nn.Linear, input: Tensor) -> Tensor:
    """Computes the forward of an ``nn.Linear``: by :func:`linear` on the CPU in a dtype that torch
    has no fast product for, elsewhere by torch."""
    weight, bias = module.weight, module.bias
    if input.device.type == "cpu" and SLOW_ON_CPU and _is_slow(input, weight, bias):
        return linear(input, weight, bias)
    return F.linear(input, weight, bias)


def _is_slow(*tensors: Tensor | None) -> bool:
    """Returns whether torch would multiply these slowly, and the op takes them."""
    given = [tensor for tensor in tensors if tensor is not None]
    lowered = autocast_dtype("cpu")
    if lowered is None and any(tensor.dtype != given[0].dtype for tensor in given):
        return False
    return (lowered or given[0].dtype) in SLOW_ON_CPU and all(map(takes_ops, given))
