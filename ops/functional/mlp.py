"""The op ``headroom::mlp_block``: its fake, its gradient and its FLOPs. Users call
:func:`headroom.nn.functional.mlp_block`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.registration import FLOATS, differentiable, refuse_derivative, require
from .._core.rows import check_rows

__all__ = ["ACTIVATIONS", "NORMS", "SAVES", "wanted_gradients"]

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu_squared": 4}
NORMS = {"rms": 0, "layer": 1}
SAVES = {"all": 0, "gate_up": 1, "input": 2}

# hr_mlp_wanted in headroom.h, and the tensor arguments of the op that each bit belongs to.
X, NORM_WEIGHT, NORM_BIAS, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = (1 << k for k in range(7))
THROUGH = X | NORM_WEIGHT | NORM_BIAS | GATE_UP | GATE_UP_BIAS  # the activation
BITS = (
    *(X, NORM_WEIGHT, NORM_BIAS, GATE_UP, GATE_UP),
    *(DOWN, GATE_UP_BIAS, GATE_UP_BIAS, DOWN_BIAS),
)
TENSORS = len(BITS)


def wanted_gradients(needs: Sequence[bool]) -> int:
    """Returns the sum of the bits for the gradients that are needed, given per tensor argument."""
    wanted = 0
    for bit, needed in zip(BITS, needs):
        wanted |= bit if needed else 0
    return wanted


# ---- What is kept: mlp_kept() and mlp_reads_x() in capi/nn/mlp_plan.c -------------------------


def _kept(save: int, wanted: int) -> dict[str, bool]:
    through, down = bool(wanted & THROUGH), bool(wanted & DOWN)
    gates = through and save != SAVES["input"]
    kept = {
        "normed": bool(wanted & GATE_UP) and save == SAVES["all"],
        "gates": gates,
        "activated": down and (save == SAVES["all"] or (save == SAVES["gate_up"] and not through)),
    }
    evaluates_gates = (through or (down and not kept["activated"])) and not gates
    evaluates_normed = (bool(wanted & GATE_UP) or evaluates_gates) and not kept["normed"]
    kept["x"] = bool(wanted & (X | NORM_WEIGHT | NORM_BIAS)) or evaluates_normed
    return kept


# ---- Fakes and FLOPs ---------------------------------------------------------------------------


def _check(rows: Tensor, gate_up, up, down, matrices_bias, norm_vectors) -> tuple[int, int]:
    """Returns the inner features and the width of gate and up together."""
    check_rows(rows, {}, norm_vectors)
    require(down.dim() == 2 and gate_up.dim() == 2, "gate_up and down must be matrices")
    hidden, features = rows.shape[-1], down.shape[1]
    gated = up is not None or gate_up.shape[0] != features
    width = 2 * features if gated and up is None else features
    shapes = {"gate_up": (width, hidden), "up": (features, hidden), "down": (hidden, features)}
    for (name, shape), matrix in zip(shapes.items(), (gate_up, up, down)):
        if matrix is not None:
            sizes = f"[{shape[0]}, {shape[1]}]"
            require(tuple(matrix.shape) == shape, f"{name} must be a matrix {sizes}")
    sizes = {"gate_up_bias": width, "up_bias": features, "down_bias": hidden}
    for (name, size), bias in zip(sizes.items(), matrices_bias):
        if bias is not None:
            require(tuple(bias.shape) == (size,), f"{name} must be a tensor [{size}]")
    for name, tensor in {"gate_up": gate_up, "up": up, "down": down}.items():
        if tensor is not None:
            same = tensor.dtype == rows.dtype and tensor.dtype in FLOATS
            require(
                same, f"{name} has dtype {tensor.dtype}, which is another than that of the rows"
            )
    return features, 2 * features if gated else features


def _fake(*arguments):
    x, norm_weight, norm_bias, gate_up, up, down, *biases = arguments[:TENSORS]
    norm, *_, save, wanted, _ = arguments[TENSORS:]
    norm_vectors = {"norm_weight": norm_weight, "norm_bias": norm_bias}
    features, width = _check(x, gate_up, up, down, biases, norm_vectors)
    tokens, hidden = prod(x.shape[:-1]), x.shape[-1]
    kept = _kept(save, wanted)

    def rows(name: str, cols: int) -> Tensor:
        return x.new_empty((tokens, cols) if kept[name] else (0,))

    def statistics(is_kept: bool) -> Tensor:
        return x.new_empty(tokens if is_kept else 0, dtype=torch.float32)

    return (
        x.new_empty(x.shape),
        statistics(kept["x"] and norm == NORMS["layer"]),
        statistics(kept["x"]),
        rows("normed", hidden),
        rows("gates", width),
        rows("activated", features),
    )


def _fake_backward(*arguments):
    dy, x, norm_weight, norm_bias, gate_up, up, down, gate_up_bias, up_bias = arguments[:9]
    gradients = arguments[-1]
    norm_vectors = {"norm_weight": norm_weight, "norm_bias": norm_bias}
    _check(dy, gate_up, up, down, (gate_up_bias, up_bias, None), norm_vectors)
    like_norm = next((t for t in (norm_weight, norm_bias) if t is not None), dy)

    def empty(bit: int, shape: Sequence[int], like: Tensor = dy, given: bool = True) -> Tensor:
        return like.new_empty(tuple(shape) if gradients & bit and given else (0,))

    hidden, apart = dy.shape[-1:], up is not None
    up_shape = up.shape if apart else (0,)
    return (
        empty(X | NORM_WEIGHT | NORM_BIAS, dy.shape),
        empty(NORM_WEIGHT, hidden, like_norm),
        empty(NORM_BIAS, hidden, like_norm),
        empty(GATE_UP, gate_up.shape),
        empty(GATE_UP, up_shape, given=apart),
        empty(DOWN, down.shape),
        empty(GATE_UP_BIAS, gate_up.shape[:1]),
        empty(GATE_UP_BIAS, up_shape[:1], given=apart),
        empty(DOWN_BIAS, hidden),
    )


def _products(gate_up, up, down) -> tuple[int, int]:
    """FLOPs per token of gate and up, and of down, from the shapes of their matrices."""
    gates = 2 * prod(gate_up) + (2 * prod(up) if up is not None else 0)
    return gates, 2 * prod(down)


def _flops(x, norm_weight, norm_bias, gate_up, up, down, *_, **__) -> int:
    return prod(x[:-1]) * sum(_products(gate_up, up, down))


def _backward_flops(dy, x, norm_weight, norm_bias, gate_up, up, down, *rest, **_) -> int:
    kept_gates, kept_activated = rest[5], rest[6]
    gradients = rest[-1]
    gates, inner = _products(gate_up, up, down)
    through, down_wanted = bool(gradients & THROUGH), bool(gradients & DOWN)
    evaluates = through or (down_wanted and not prod(kept_activated))
    total = gates if evaluates and not prod(kept_gates) else 0
    total += inner * (through + down_wanted)
    total += gates if gradients & GATE_UP else 0
    total += gates if gradients & (X | NORM_WEIGHT | NORM_BIAS) else 0
    return prod(dy[:-1]) * total


# ---- Gradients ---------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, *weights = inputs[: TENSORS - 1]  # without down_bias, which backward does not read
    norm, casting, _, *options = inputs[TENSORS:]
    ctx.options = (norm, casting, *options)
    save, wanted = inputs[-3:-1]
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    if wanted:
        ctx.save_for_backward(x if _kept(save, wanted)["x"] else None, *weights, *kept)


def _backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple:
    saved = ctx.saved_tensors  # unpacked once: a hook may evaluate them again
    nothing = (None,) * (len(ctx.options) + 1)  # one option is not there: eps
    gradients = wanted_gradients(ctx.needs_input_grad)
    if dy is None or not gradients:
        return (None,) * TENSORS + nothing
    found = torch.ops.headroom.mlp_block_backward(dy, *saved, *ctx.options, gradients)
    needs = ctx.needs_input_grad
    return tuple(g if need else None for g, need in zip(found, needs)) + nothing


differentiable("mlp_block", fake=_fake, setup_context=_setup, backward=_backward, flops=_flops)
refuse_derivative("mlp_block_backward", fake=_fake_backward, flops=_backward_flops)
