"""The experts of a mixture as one op, which goes through them one by one: ``headroom::experts``."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
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
from .quantize_matrix import DENSE, QuantizedMatrix, parts_of, require_fit

ACTIVATIONS = {"silu": 0, "gelu_tanh": 2, "relu_squared": 4, "swiglu_clamped": 5}
SAVES = {"L0": 0, "L1": 1, "L2": 2}

# hr_experts_wanted in headroom.h, and the tensor arguments of the op that each bit belongs to.
X, WEIGHT, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = (1 << k for k in range(6))
GATE_UP_A, GATE_UP_B, DOWN_A, DOWN_B = (1 << k for k in range(6, 10))
BITS = {
    "x": X,
    "weight": WEIGHT,
    "gate_up": GATE_UP,
    "down": DOWN,
    "gate_up_bias": GATE_UP_BIAS,
    "down_bias": DOWN_BIAS,
    "gate_up_a": GATE_UP_A,
    "gate_up_b": GATE_UP_B,
    "down_a": DOWN_A,
    "down_b": DOWN_B,
}
INNER = sum(BITS.values()) - DOWN_BIAS  # the gradients that need gate and up
INDEX_TYPES = (torch.int64, torch.int32, torch.int16)


def experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor | QuantizedMatrix,
    down: Tensor | QuantizedMatrix,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_adapter: tuple[Tensor, Tensor, float] | None = None,
    down_adapter: tuple[Tensor, Tensor, float] | None = None,
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
            that of ``x`` expert by expert, and never as a whole. Either may be a stack of 4 or 8
            bits from :func:`quantize_matrix`, whose ``shape`` has three numbers: it is decoded
            expert by expert, in both passes, and has no gradient.
        down: ``[experts, hidden, features]``.
        gate_up_bias, down_bias: ``[experts, 2 * features]`` and ``[experts, hidden]`` in the dtype
            of ``x``, or None.
        gate_up_adapter, down_adapter: ``(A, B, scale)``, or None: an adapter for every expert
            (LoRA, arXiv:2106.09685), whose product ``scale * (input @ A[e].T) @ B[e].T`` is added
            to that with the matrix of the expert: A ``[experts, rank, inputs]`` and B ``[experts,
            outputs, rank]``, also where stacks are ``transposed``, both float32 or both of the
            dtype of ``x``, to which float32 is rounded expert by expert. Nothing of an adapter is
            kept for the backward pass, which evaluates ``input @ A[e].T`` again.
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
            ``gate_up`` or its adapter gets a gradient, or at "L2".

    Under autocast ``x`` and the biases are cast to its dtype, and stacks and adapters if they are
    float32 expert by expert.

    Returns:
        A contiguous tensor like ``x``, with gradients of ``x``, ``weight``, dense stacks, biases
        and adapters; experts without tokens get zeros. A second derivative raises.

    Raises:
        ValueError: a name is none of those listed, or ``alpha`` or ``limit`` is not above 0.
        TypeError: an argument that must be a tensor is none, or an adapter is no such tuple.
        RuntimeError: another argument does not fit, or a CUDA graph is captured.

    On CUDA a call copies how many rows each expert has to the host, for which it waits; its
    backward pass does not. Products follow ``torch.backends.cuda.matmul`` and
    ``torch.use_deterministic_algorithms``. The formula is documented at ``hr_experts_forward`` in
    ``headroom.h``.
    """
    check_tensors(x=x, index=index, weight=weight)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("save", save, SAVES)
    check_flags(gated=gated, transposed=transposed, interleaved=interleaved)
    for name, number in (("alpha", alpha), ("limit", 1.0 if limit is None else limit)):
        check_number(name, number)
        if not 0 < number < inf:
            raise ValueError(f"{name} is {number}, wanted a finite number above 0")
    stacks = {
        name: parts_of(stack, name, "[experts, rows, cols]")
        for name, stack in (("gate_up", gate_up), ("down", down))
    }
    count, *sizes = stacks["down"][2]
    features = sizes[0 if transposed else 1]
    if x.dim() == 2:
        _check_sizes(stacks, x.shape[1], features, gated, transposed)
    (first, first_scales, _, first_layout), (second, second_scales, _, layout) = stacks.values()
    a, b, scale = _adapter("gate_up_adapter", gate_up_adapter)
    second_a, second_b, second_scale = _adapter("down_adapter", down_adapter)
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, gate_up_bias, down_bias = cast(dtype, x, gate_up_bias, down_bias)
        wide = (first, second, a, b, second_a, second_b)
        first, second, a, b, second_a, second_b = (
            t if t is None or t.dtype not in FLOATS[1:] else cast(dtype, t)[0] for t in wide
        )
        if weight.dtype != x.dtype:
            (weight,) = cast(torch.float32, weight)
    tensors = (x, weight, first, second, gate_up_bias, down_bias, a, b, second_a, second_b)
    # A tensor of one level of torch.func does not say whether another level differentiates it.
    every = torch._C._are_functorch_transforms_active()
    needs = [
        t is not None and t.is_floating_point() and (every or t.requires_grad) for t in tensors
    ]
    return torch.ops.headroom.experts(
        *(x, index, weight, first, second, gate_up_bias, down_bias, first_scales, second_scales),
        *(a, b, second_a, second_b),
        ACTIVATIONS[activation],
        gated,
        transposed,
        interleaved,
        alpha,
        0.0 if limit is None else limit,
        0,
        count,
        features,
        *first_layout,
        *layout,
        scale,
        second_scale,
        SAVES[save],
        _sum_of(needs) if torch.is_grad_enabled() else 0,
        matmul_precision(x.dtype) if x.device.type == "cuda" else 0,
    )[0]


def _check_sizes(
    stacks: dict[str, Any], hidden: int, features: int, gated: bool, transposed: bool
) -> None:
    """Raises where stacks of few bits do not fit, of which the op sees only how many codes they
    have."""
    count, sizes = stacks["down"][2][0], _matrices(hidden, features, gated)
    for name, (_, scales, shape, _) in stacks.items():
        rows, cols = sizes[name][::-1] if transposed else sizes[name]
        require(
            scales is None or tuple(shape) == (count, rows, cols),
            f"{name} is {[*shape]}, wanted {[count, rows, cols]}",
        )


def _matrices(hidden: int, features: int, gated: bool) -> dict[str, tuple[int, int]]:
    """Returns the outputs and inputs of the matrices of an expert."""
    return {"gate_up": (2 * features if gated else features, hidden), "down": (hidden, features)}


def _adapter(name: str, given: Any) -> tuple[Tensor | None, Tensor | None, float]:
    if given is None:
        return None, None, 0.0
    if not isinstance(given, tuple) or len(given) != 3:
        size = f" of {len(given)}" if isinstance(given, tuple) else ""
        raise TypeError(f"{name} is a {type(given).__name__}{size}, wanted a tuple (A, B, scale)")
    a, b, scale = given
    check_tensors(**{f"A of {name}": a, f"B of {name}": b})
    check_number(f"scale of {name}", scale)
    return a, b, scale


def _sum_of(needs: Sequence[bool]) -> int:
    return sum(bit for bit, needed in zip(BITS.values(), needs) if needed)


_TENSORS = (
    *("weight", "gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scales", "down_scales"),
    *("gate_up_a", "gate_up_b", "down_a", "down_b"),
)
_NUMBERS = (
    *("activation", "gated", "transposed", "interleaved", "alpha", "limit", "tile_rows"),
    *("experts", "features"),
    *(
        f"{name}_{what}"
        for name in ("gate_up", "down")
        for what in ("format", "block_size", "nested")
    ),
    *("gate_up_adapter_scale", "down_adapter_scale", "save", "wanted", "precision"),
)


def reads_x(save: int, wanted: int) -> bool:
    """Returns whether the backward pass reads x: ``experts_reads_x()`` in capi/nn."""
    first = bool(wanted & (GATE_UP | GATE_UP_A | GATE_UP_B))
    return first or (bool(wanted & INNER) and save == SAVES["L2"])


def _check(name: str, rows: Tensor, given: dict[str, Any]) -> tuple[int, int]:
    """Raises what the op raises of the tensors that both passes take, and returns the number of
    rows, and the width of gate and up."""
    require(rows.dtype in FLOATS, f"{name} has dtype {rows.dtype}, wanted one of {FLOATS}")
    require(rows.dim() == 2, f"{name} has shape {[*rows.shape]}, wanted [tokens, hidden]")
    tokens, hidden = rows.shape
    weight, count, features = given["weight"], given["experts"], given["features"]
    require(
        weight.dim() == 2 and weight.shape[0] == tokens and weight.shape[1] > 0,
        f"weight has shape {[*weight.shape]}, wanted [{tokens}, slots] with 1 slot or more",
    )
    _check_dtype("weight", weight, rows)
    sizes = _matrices(hidden, features, given["gated"])
    for stack, (outputs, inputs) in sizes.items():
        _check_stack(stack, rows, given, outputs, inputs)
        a, b = given[f"{stack}_a"], given[f"{stack}_b"]
        require((a is None) == (b is None), f"one of {stack}_a and {stack}_b is None")
        if a is None:
            continue
        rank = a.shape[1] if a.dim() == 3 else 0
        for key, tensor, shape in (
            (f"{stack}_a", a, (count, rank, inputs)),
            (f"{stack}_b", b, (count, outputs, rank)),
        ):
            _check_dtype(key, tensor, rows)
            require(
                rank > 0 and tensor.shape == shape,
                f"{key} has shape {[*tensor.shape]}, wanted {[*shape]} with a rank of 1 or more",
            )
        require(a.dtype == b.dtype, f"{stack}_b has dtype {b.dtype}, but {stack}_a {a.dtype}")
    return tokens * weight.shape[1], sizes["gate_up"][0]


def _check_dtype(name: str, tensor: Tensor, rows: Tensor) -> None:
    require(
        tensor.dtype in (rows.dtype, torch.float32),
        f"{name} has dtype {tensor.dtype}, wanted that of rows, {rows.dtype}, or float32",
    )


def _check_stack(name: str, rows: Tensor, given: dict[str, Any], outputs: int, inputs: int) -> None:
    """The matrices of one product, and their biases."""
    tensor, bias, count = given[name], given[f"{name}_bias"], given["experts"]
    r, c = (inputs, outputs) if given["transposed"] else (outputs, inputs)
    layout = [given[f"{name}_{what}"] for what in ("format", "block_size", "nested")]
    if layout[0] == DENSE:
        _check_dtype(name, tensor, rows)
        require(
            tensor.shape == (count, r, c),
            f"{name} has shape {[*tensor.shape]}, wanted {[count, r, c]}",
        )
    else:
        scales = given[f"{name}_scales"]
        require(scales is not None, f"{name}_scales is None, but {name} has few bits")
        require_fit(tensor, scales, count * r, c, *layout)
        bit = BITS[name]
        require(
            not given["wanted"] & bit,
            f"a gradient of {name} is wanted, but stacks of few bits have none",
        )
    require(
        bias is None or (bias.dtype == rows.dtype and bias.shape == (count, outputs)),
        f"{name}_bias must be a tensor [{count}, {outputs}] of the dtype of the rows",
    )


def _fake(x, index, **given):
    rows, width = _check("x", x, given)
    require(
        index.dtype in INDEX_TYPES, f"index has dtype {index.dtype}, wanted int64, int32 or int16"
    )
    require(index.shape == given["weight"].shape, "index has another shape than weight")
    require(
        given["gated"] or not given["interleaved"],
        "interleaved is True, wanted False without gated",
    )
    inner, save = bool(given["wanted"] & INNER), given["save"]
    keeps_gates, keeps_activated = inner and save < SAVES["L2"], inner and save == SAVES["L0"]
    host = "meta" if x.device.type == "meta" else "cpu"
    return (
        x.new_empty(x.shape),
        x.new_empty((rows, width) if keeps_gates else (0,)),
        x.new_empty((rows, given["features"]) if keeps_activated else (0,)),
        x.new_empty(rows, dtype=torch.int32),
        x.new_empty(given["experts"] + 1, dtype=torch.int32, device=host),
    )


def _fake_backward(dy, gradients, **given):
    _check("dy", dy, given)
    tensors = (dy, *(given[name] for name in BITS if name != "x"))
    return tuple(
        dy.new_empty(0) if tensor is None or not gradients & bit else tensor.new_empty(tensor.shape)
        for bit, tensor in zip(BITS.values(), tensors)
    )


def _save(ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
    kept = ("gates", "activated", "order", "offsets")
    ctx.save_for_backward(
        given["x"] if reads_x(given["save"], given["wanted"]) else None,
        *(given[name] for name in _TENSORS),
        *(results[name] for name in kept),
    )
    # gates are left out: through them a second derivative finds what it must raise.
    ctx.mark_non_differentiable(*(results[name] for name in ("activated", "order", "offsets")))
    ctx.set_materialize_grads(False)
    ctx.numbers = {name: given[name] for name in _NUMBERS}


def _backward(
    ctx: Any, grads: dict[str, Tensor | None], needs: dict[str, bool]
) -> dict[str, Tensor | None]:
    saved = ctx.saved_tensors  # x, _TENSORS, and what was kept
    gradients = _sum_of([needs[name] for name in BITS])
    if not gradients or grads["y"] is None:
        return {}
    found = torch.ops.headroom.experts_backward(
        grads["y"], *saved, **ctx.numbers, gradients=gradients
    )
    return dict(zip(BITS, found))


# ---- FLOPs ---------------------------------------------------------------------------------------


def _sizes(
    rows: Sequence[int],
    weight: Any,
    features: int,
    gated: bool,
    gate_up_a: Any,
    down_a: Any,
    **_: Any,
) -> tuple[int, ...]:
    """Returns twice the number of rows; hidden, width, features; and the ranks of adapters."""
    width = 2 * features if gated else features
    ranks = (0 if a is None else a[1] for a in (gate_up_a, down_a))
    return 2 * prod(weight), rows[-1], width, features, *ranks


def _flops(x, **given) -> int:
    rows, hidden, width, features, first, second = _sizes(x, **given)
    adapters = first * (hidden + width) + second * (features + hidden)
    return rows * (hidden * width + features * hidden + adapters)


def _backward_flops(dy, gradients, save, **given) -> int:
    rows, hidden, width, features, first, second = _sizes(dy, **given)
    inner, of_x, of_a = (bool(gradients & bits) for bits in (INNER, X, GATE_UP_A))
    total = features * hidden * (inner + bool(gradients & DOWN))
    total += hidden * width * (of_x + bool(gradients & GATE_UP))
    total += second * (hidden + features) * inner  # u, and u A
    total += second * (features * bool(gradients & DOWN_A) + hidden * bool(gradients & DOWN_B))
    total += first * (width * (of_x or of_a) + hidden * (of_x + of_a))
    total += first * width * bool(gradients & GATE_UP_B)
    return rows * total + _again(dy, gradients, save, **given)


def _again(dy, gradients, save, **given) -> int:
    rows, hidden, width, features, first, second = _sizes(dy, **given)
    narrow = second * features * bool(gradients & DOWN_B)
    if save == SAVES["L2"]:
        product = hidden * width + first * (hidden + width)
        return rows * (narrow + product * bool(gradients & INNER))
    return rows * (narrow + first * hidden * bool(gradients & GATE_UP_B))


differentiable("experts", fake=_fake, save=_save, backward=_backward, flops=_flops)
refuse_derivative("experts_backward", fake=_fake_backward, on_host=("offsets",))
register_flops("experts_backward", _backward_flops, _again)
