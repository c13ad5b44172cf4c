"""The experts of a mixture as one op, which goes through them one by one: ``headroom::experts``."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_choice, check_flags, check_number
from .._core.registration import (
    FLOATS,
    differentiable,
    refuse_derivative,
    register_flops,
    require,
)
from .._core.rows import autocast_dtype, cast, check_tensors
from .gemm import matmul_precision

ACTIVATIONS = {"silu": 0, "gelu_tanh": 2, "relu_squared": 4, "swiglu_clamped": 5}
SAVES = {"L0": 0, "L1": 1, "L2": 2}

# hr_experts_wanted in headroom.h, and the tensor arguments of the op that each bit belongs to.
X, WEIGHT, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = (1 << k for k in range(6))
BITS = {
    "x": X,
    "weight": WEIGHT,
    "gate_up": GATE_UP,
    "down": DOWN,
    "gate_up_bias": GATE_UP_BIAS,
    "down_bias": DOWN_BIAS,
}
INNER = X | WEIGHT | GATE_UP | GATE_UP_BIAS | DOWN  # the gradients that need gate and up
INDEX_TYPES = (torch.int64, torch.int32, torch.int16)


def experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    save: str = "L1",
) -> Tensor:
    """Returns what the experts of a mixture make of tokens, weighted and summed for each token.

    Row t is the sum over k of ``weight[t, k] * down_e(act(gate_up_e(x[t])))`` with ``e = index[t,
    k]``, the experts to which a router has sent the token.

    Experts come one after another, their tokens in tiles of 512 rows: no copy of ``x`` for every
    expert of a token, no product that is as long, and no result of ``down`` is kept. Sums over the
    experts of a token are float32, in the order of the experts, and rounded once; nothing is
    added by atomics. Every ``save`` gives the same gradients, bit for bit.

    Args:
        x: float32, bfloat16 or float16 ``[tokens, hidden]``.
        index: int64, int32 or int16 ``[tokens, slots]``: the experts of each token. Numbers outside
            ``[0, experts)`` are dropped: they add nothing, and their weights get gradients of zero.
        weight: ``[tokens, slots]``, float32 or of the dtype of ``x``; its gradient has its dtype.
        gate_up: ``[experts, 2 * features, hidden]``, or ``[experts, features, hidden]`` if not
            ``gated``. Both stacks have the dtype of ``x`` or are float32, and are then rounded to
            that of ``x`` expert by expert, and never as a whole.
        down: ``[experts, hidden, features]``.
        gate_up_bias, down_bias: ``[experts, 2 * features]`` and ``[experts, hidden]`` in the dtype
            of ``x``, or None.
        activation: "silu", "gelu_tanh" or "relu_squared" of the gate, multiplied by ``up`` if
            ``gated``; or "swiglu_clamped", ``(up + 1) * gate * sigmoid(alpha * gate)`` (gpt-oss).
        gated: whether ``gate_up`` has rows of ``up``, too.
        transposed: whether stacks are ``[experts, hidden, 2 * features]`` and ``[experts, features,
            hidden]``.
        interleaved: whether gate and up alternate in ``gate_up``, and do not lie one behind the
            other.
        alpha: of "swiglu_clamped".
        limit: the gate is at most this before its activation, and ``up`` from ``-limit`` to
            ``limit``; None: neither is held back.
        save: what is kept for the backward pass besides ``x``, the weights and 4 bytes for each
            expert of a token, in elements per token and slot: "L0" keeps ``3 * features`` and
            evaluates nothing again, "L1" keeps ``2 * features`` and evaluates the activation again,
            "L2" keeps nothing and evaluates the first product again, too. ``x`` is kept if
            ``gate_up`` gets a gradient, or at "L2".

    Under autocast ``x`` and the biases are cast to its dtype, and the stacks if they are float32
    expert by expert.

    Returns:
        A contiguous tensor like ``x``, with gradients of ``x``, ``weight``, the stacks and the
        biases; experts without tokens get zeros. A second derivative raises.

    Raises:
        ValueError: a name is none of those listed, or ``alpha`` or ``limit`` is not above 0.
        TypeError: an argument that must be a tensor is none.
        RuntimeError: another argument does not fit, or a CUDA graph is captured.

    On CUDA a call copies how many rows each expert has to the host, for which it waits; its
    backward pass does not. Products follow ``torch.backends.cuda.matmul`` and
    ``torch.use_deterministic_algorithms``. The formula is documented at ``hr_experts_forward`` in
    ``headroom.h``.
    """
    check_tensors(x=x, index=index, weight=weight, gate_up=gate_up, down=down)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("save", save, SAVES)
    check_flags(gated=gated, transposed=transposed, interleaved=interleaved)
    for name, number in (("alpha", alpha), ("limit", 1.0 if limit is None else limit)):
        check_number(name, number)
        if not (number > 0 and isfinite(number)):
            raise ValueError(f"{name} is {number}, wanted a finite number above 0")
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, gate_up_bias, down_bias = cast(dtype, x, gate_up_bias, down_bias)
        gate_up, down = (
            t if t.dtype == torch.float32 else cast(dtype, t)[0] for t in (gate_up, down)
        )
        if weight.dtype != x.dtype:
            (weight,) = cast(torch.float32, weight)
    tensors = (x, weight, gate_up, down, gate_up_bias, down_bias)
    # A tensor of one level of torch.func does not say whether another level differentiates it.
    every = torch._C._are_functorch_transforms_active()
    needs = [tensor is not None and (every or tensor.requires_grad) for tensor in tensors]
    return torch.ops.headroom.experts(
        x,
        index,
        weight,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        ACTIVATIONS[activation],
        gated,
        transposed,
        interleaved,
        alpha,
        0.0 if limit is None else limit,
        0,
        SAVES[save],
        _sum_of(needs) if torch.is_grad_enabled() else 0,
        matmul_precision(x.dtype) if x.device.type == "cuda" else 0,
    )[0]


def _sum_of(needs: Sequence[bool]) -> int:
    return sum(bit for bit, needed in zip(BITS.values(), needs) if needed)


_NUMBERS = (
    *("activation", "gated", "transposed", "interleaved", "alpha", "limit", "tile_rows"),
    *("save", "wanted", "precision"),
)


def reads_x(save: int, wanted: int) -> bool:
    """Returns whether the backward pass reads x: ``experts_reads_x()`` in capi/nn."""
    return bool(wanted & GATE_UP) or (bool(wanted & INNER) and save == SAVES["L2"])


def _check(name, rows, weight, gate_up, down, gate_up_bias, down_bias, gated, transposed) -> tuple:
    """Raises what the op raises of the tensors that both passes take, and returns the number of
    rows, the width of gate and up, and features."""
    require(rows.dtype in FLOATS, f"{name} has dtype {rows.dtype}, wanted one of {FLOATS}")
    require(rows.dim() == 2, f"{name} has shape {[*rows.shape]}, wanted [tokens, hidden]")
    tokens, hidden = rows.shape
    require(
        weight.dim() == 2 and weight.shape[0] == tokens,
        f"weight has shape {[*weight.shape]}, wanted [{tokens}, slots]",
    )
    for other, tensor in (("weight", weight), ("gate_up", gate_up), ("down", down)):
        require(
            tensor.dtype in (rows.dtype, torch.float32),
            f"{other} has dtype {tensor.dtype}, wanted that of {name}, {rows.dtype}, or float32",
        )
    require(gate_up.dim() == 3 and down.dim() == 3, "gate_up and down must have 3 dimensions")
    count, features = down.shape[0], down.shape[1 if transposed else 2]
    width = 2 * features if gated else features
    for other, tensor, outputs, inputs in (
        ("gate_up", gate_up, width, hidden),
        ("down", down, hidden, features),
    ):
        shape = (count, inputs, outputs) if transposed else (count, outputs, inputs)
        require(
            tensor.shape == shape,
            f"{other} has shape {[*tensor.shape]}, wanted {[*shape]}",
        )
    for other, tensor, size in (
        ("gate_up_bias", gate_up_bias, width),
        ("down_bias", down_bias, hidden),
    ):
        require(
            tensor is None or (tensor.dtype == rows.dtype and tensor.shape == (count, size)),
            f"{other} must be a tensor [{count}, {size}] of the dtype of {name}",
        )
    return tokens * weight.shape[1], width, features


def _fake(x, index, weight, gate_up, down, gate_up_bias, down_bias, gated, transposed, **given):
    rows, width, features = _check(
        "x", x, weight, gate_up, down, gate_up_bias, down_bias, gated, transposed
    )
    require(
        index.dtype in INDEX_TYPES, f"index has dtype {index.dtype}, wanted int64, int32 or int16"
    )
    require(index.shape == weight.shape, "index has another shape than weight")
    require(gated or not given["interleaved"], "interleaved is True, wanted False without gated")
    inner, save = bool(given["wanted"] & INNER), given["save"]
    keeps_gates, keeps_activated = inner and save < SAVES["L2"], inner and save == SAVES["L0"]
    host = "meta" if x.device.type == "meta" else "cpu"
    return (
        x.new_empty(x.shape),
        x.new_empty((rows, width) if keeps_gates else (0,)),
        x.new_empty((rows, features) if keeps_activated else (0,)),
        x.new_empty(rows, dtype=torch.int32),
        x.new_empty(down.shape[0] + 1, dtype=torch.int32, device=host),
    )


def _fake_backward(
    dy, x, weight, gate_up, down, gate_up_bias, down_bias, gated, transposed, gradients, **_
):  # fmt: skip
    _check("dy", dy, weight, gate_up, down, gate_up_bias, down_bias, gated, transposed)
    tensors = (dy, weight, gate_up, down, gate_up_bias, down_bias)
    return tuple(
        dy.new_empty(0) if tensor is None or not gradients & bit else tensor.new_empty(tensor.shape)
        for bit, tensor in zip(BITS.values(), tensors)
    )


def _save(ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
    kept = ("gates", "activated", "order", "offsets")
    ctx.save_for_backward(
        given["x"] if reads_x(given["save"], given["wanted"]) else None,
        *(given[name] for name in BITS if name != "x"),
        *(results[name] for name in kept),
    )
    # gates are left out: through them a second derivative finds what it must raise.
    ctx.mark_non_differentiable(*(results[name] for name in ("activated", "order", "offsets")))
    ctx.set_materialize_grads(False)
    ctx.numbers = {name: given[name] for name in _NUMBERS}


def _backward(
    ctx: Any, grads: dict[str, Tensor | None], needs: dict[str, bool]
) -> dict[str, Tensor | None]:
    x, weight, gate_up, down, gate_up_bias, down_bias, *kept = ctx.saved_tensors
    gradients = _sum_of([needs[name] for name in BITS])
    if not gradients or grads["y"] is None:
        return {}
    found = torch.ops.headroom.experts_backward(
        *(grads["y"], x, weight, gate_up, down, gate_up_bias, down_bias),
        *kept,
        **ctx.numbers,
        gradients=gradients,
    )
    return dict(zip(BITS, found))


def _products(weight: Sequence[int], gate_up: Sequence[int], down: Sequence[int]) -> tuple:
    """Returns the FLOPs of all rows in the first product, and in the second."""
    rows = 2 * prod(weight)
    return rows * prod(gate_up[1:]), rows * prod(down[1:])


def _flops(weight, gate_up, down, **_) -> int:
    return sum(_products(weight, gate_up, down))


def _backward_flops(weight, gate_up, down, gradients, save, **_) -> int:
    first, second = _products(weight, gate_up, down)
    total = second * (bool(gradients & INNER) + bool(gradients & DOWN))
    total += first * (bool(gradients & X) + bool(gradients & GATE_UP))
    return total + _again(weight, gate_up, down, gradients, save)


def _again(weight, gate_up, down, gradients, save, **_) -> int:
    return _products(weight, gate_up, down)[0] * bool(gradients & INNER and save == SAVES["L2"])


differentiable("experts", fake=_fake, save=_save, backward=_backward, flops=_flops)
refuse_derivative("experts_backward", fake=_fake_backward, on_host=("offsets",))
register_flops("experts_backward", _backward_flops, _again)
