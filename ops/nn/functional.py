"""Blocks as functions of their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.checks import check_choice, check_flags
from .._core.rows import autocast, check_tensors
from ..functional.gemm import matmul_precision
from ..functional.mlp import ACTIVATIONS, NORMS, SAVES, of_few_bits, wanted_gradients
from ..functional.norm import CASTINGS
from ..functional.quantize_matrix import QuantizedMatrix
from .mlp_lora import Factor, LowRank, Numbers, mlp_lora

__all__ = ["LowRank", "mlp_block"]


def mlp_block(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_up_weight: Tensor | QuantizedMatrix,
    down_weight: Tensor | QuantizedMatrix,
    *,
    up_weight: Tensor | QuantizedMatrix | None = None,
    norm_bias: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_adapter: LowRank | None = None,
    up_adapter: LowRank | None = None,
    down_adapter: LowRank | None = None,
    norm: str = "rms",
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str | None = None,
    activation: str = "silu",
    residual: bool = True,
    save: str = "gate_up",
    tile_tokens: int = 0,
) -> Tensor:
    """Returns ``x + (act(normed @ gate.T) * (normed @ up.T)) @ down.T`` with ``normed = norm(x)``.

    This is the feed-forward half of a transformer block as one op. In training it keeps what
    ``save`` says and evaluates the rest again in the backward pass, which gives the same gradients,
    bit for bit, whatever is kept. Both passes take a tile of tokens at a time, so that their
    scratch memory does not grow with the number of tokens. Without gradients nothing is kept.

    Args:
        x: float32, bfloat16 or float16 ``[..., hidden]``, of any strides.
        norm_weight: ``[hidden]`` in any of these dtypes, or None for ones.
        gate_up_weight: ``[2 * features, hidden]``, the rows of the gate first; or the gate alone,
            ``[features, hidden]``, with ``up_weight``, or for a block without a gate, which is
            ``act(normed @ gate_up.T) @ down.T``.
        down_weight: ``[hidden, features]``. Matrices have the dtype of ``x``.
        up_weight: ``[features, hidden]``, where it is a matrix of its own. All matrices may be of 4
            or 8 bits in one format, from :func:`headroom.functional.quantize_matrix`: they have no
            gradients, and are decoded to the dtype of ``x`` in parts of 4 MiB, or 32 MiB on CUDA,
            for each product again.
        norm_bias: ``[hidden]``, with ``norm="layer"``.
        gate_up_bias, up_bias, down_bias: added to the products: as long as their matrices have
            rows.
        gate_up_adapter, up_adapter, down_adapter: what is added to a matrix, which is then frozen,
            as all of them must be. Matrices may then be some dense and some of few bits, in any
            formats.
        norm: "rms" or "layer".
        eps: of the norm: added to the mean of squares, or to the variance.
        offset: added to ``norm_weight``; 1.0 for Gemma.
        casting: as in :func:`headroom.functional.rms_norm`; None is "llama" for an RMS norm and
            "once" for a layer norm.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "relu_squared".
        residual: whether ``x`` is added. It is added to the product before that is rounded.
        save: what is kept besides ``x`` and the statistics of its rows, per token and in elements:
            "all" keeps ``hidden + 3 * features`` and evaluates nothing again; "gate_up" keeps
            ``2 * features`` and evaluates the norm and the activation again, but no product;
            "input" keeps nothing, and the first product is computed again as well. Weights without
            ``requires_grad`` get no gradient, and what only that would need is not kept.
        tile_tokens: how many tokens are taken at a time; 0: about 4,096, or all of them where that
            takes no more memory. With adapters 0 is 512 on the CPU and 4,096 elsewhere, and what is
            dropped depends on it: tile number k counts its rows from 0, with the seed plus k.

    With adapters the steps are those of :func:`headroom.functional.lora_linear` and the other ops,
    with their roundings: gradients are those of these ops one after another, and ``x`` is added to
    the rounded product. Per token and adapter, ``rank`` values are kept besides: at "input" those
    of ``down`` alone. torch.compile and torch.func get the ops, and decide what is kept.

    Under autocast ``x`` and the matrices are cast to its dtype, as in
    ``torch.nn.functional.linear``, and so is the result; the norm's weights stay as they are.

    Returns:
        A contiguous tensor like ``x``.

    Raises:
        ValueError: a name is none of those listed.
        RuntimeError: another argument does not fit.

    The formula and the kinds of memory are documented at ``hr_mlp_forward`` in ``headroom.h``.
    """
    check_tensors(x=x)
    check_flags(residual=residual)
    if casting is None:
        casting = "llama" if norm == "rms" else "once"
    numbers = Numbers(
        _number("norm", norm, NORMS),
        _number("casting", casting, CASTINGS),
        eps,
        offset,
        _number("activation", activation, ACTIVATIONS),
        residual,
        tile_tokens,
        _number("save", save, SAVES),
    )
    if not (gate_up_adapter is up_adapter is down_adapter is None):
        gate_up = Factor(gate_up_weight, gate_up_bias, gate_up_adapter)
        up = None if up_weight is None else Factor(up_weight, up_bias, up_adapter)
        if up is None and not (up_bias is up_adapter is None):
            raise RuntimeError("up_bias or up_adapter is given, but up_weight is not")
        down = Factor(down_weight, down_bias, down_adapter)
        return mlp_lora(x, norm_weight, norm_bias, (gate_up, up, down), numbers)
    matrices = (gate_up_weight, up_weight, down_weight)
    are_few_bits = any(isinstance(matrix, QuantizedMatrix) for matrix in matrices)
    if not are_few_bits:
        check_tensors(gate_up_weight=gate_up_weight, down_weight=down_weight)
    dense, few_bits = ((None, None, None), matrices) if are_few_bits else (matrices, ())
    for name, matrix in zip(("gate_up_weight", "up_weight", "down_weight"), few_bits):
        if not isinstance(matrix, QuantizedMatrix) and (matrix is not None or name != "up_weight"):
            raise TypeError(f"{name} is a {type(matrix).__name__}, but another is of few bits")
    x, *others = autocast(x, *dense, gate_up_bias, up_bias, down_bias)
    tensors = x, norm_weight, norm_bias, *others
    # A tensor of one level of torch.func does not say whether another level differentiates it.
    every = torch._C._are_functorch_transforms_active()
    needs = [tensor is not None and (every or tensor.requires_grad) for tensor in tensors]
    *codes, features, gated, format, block_size, nested = of_few_bits(*few_bits).values()
    return torch.ops.headroom.mlp_block(
        *tensors,
        *codes,
        numbers.norm,
        numbers.casting,
        eps,
        offset,
        numbers.activation,
        residual,
        tile_tokens,
        features,
        gated,
        format,
        block_size,
        nested,
        numbers.save,
        wanted_gradients(needs) if torch.is_grad_enabled() else 0,
        matmul_precision(x.dtype) if x.device.type == "cuda" else 0,
    )[0]


def _number(argument: str, name: str, numbers: dict[str, int]) -> int:
    check_choice(argument, name, numbers)
    return numbers[name]
