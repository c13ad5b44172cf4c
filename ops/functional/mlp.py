"""The op ``headroom::mlp_block``: its fake, its gradient and its FLOPs. Users call
:func:`headroom.nn.functional.mlp_block`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.registration import FLOATS, require
from .._core.row_ops import MATRIX, kind, row_op
from .quantize_matrix import QuantizedMatrix, layout_of, require_fit

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
MATRICES = ("gate_up", "up", "down")


def wanted_gradients(needs: Sequence[bool]) -> int:
    """Returns the sum of the bits for the gradients that are needed, given per tensor argument."""
    wanted = 0
    for bit, needed in zip(BITS, needs):
        wanted |= bit if needed else 0
    return wanted


def of_few_bits(*matrices: QuantizedMatrix | None) -> dict[str, Any]:
    """Returns the arguments of the op, by name, for ``MATRICES`` of few bits, of which ``up`` may
    be None; and for none at all, those without.

    Raises:
        RuntimeError: they have different formats, or their shapes do not fit.
    """
    names = [f"{name}_{what}" for name in MATRICES for what in ("codes", "scales")]
    if not matrices:
        rest = {"features": 0, "gated": False, "format": 0, "block_size": 0, "nested": False}
        return dict.fromkeys(names) | rest
    given = [q for q in matrices if q is not None]
    first, *_, down = given
    alike = {(q.format, q.block_size if q.format != "int8" else 0, q.nested) for q in given}
    require(len(alike) == 1, "gate_up, up and down have different formats, wanted one")
    cols, features = down.shape
    widths = (features,) if len(given) == 3 else (features, 2 * features)
    for name, q in zip(MATRICES, matrices[:-1]):
        if q is not None:
            require(
                q.shape[0] in widths and q.shape[1] == cols,
                f"{name} is {[*q.shape]}, but down is {[*down.shape]}: wanted {[widths[-1], cols]}",
            )
    tensors = [t for q in matrices for t in ((None, None) if q is None else (q.codes, q.scales))]
    return dict(zip(names, tensors)) | {
        "features": features,
        "gated": len(given) == 3 or first.shape[0] != features,
        **dict(zip(("format", "block_size", "nested"), layout_of(first))),
    }


# ---- What is kept: mlpkept_for() and mlp_reads_x() in capi/nn/mlp_plan.c -------------------------


def kept_for(save: int, wanted: int) -> dict[str, bool]:
    """Returns whether each buffer is kept for the gradients that are wanted, and x."""
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


_VECTOR = kind("cols", dtypes=FLOATS)
_KINDS = {
    "x": MATRIX,
    "norm_weight": _VECTOR,
    "norm_bias": _VECTOR,
    "down": kind("cols features"),
    "gate_up": kind("width cols"),
    "up": kind("features cols"),
    "gate_up_bias": kind("width"),
    "up_bias": kind("features"),
    "down_bias": kind("cols"),
    "y": MATRIX,
}


def _check(format: int, **given: Any) -> None:
    codes = [given[f"{name}_codes"] for name in MATRICES]
    scales = [given[f"{name}_scales"] for name in MATRICES]
    gate_up, up, down = (given[name] for name in MATRICES)
    if format == 0:
        fit = (
            gate_up is not None
            and down is not None
            and not any(t is not None for t in (*codes, *scales))
        )
        require(fit, "wanted gate_up and down, and neither codes nor scales, for format 0")
        width, features = gate_up.shape[0], down.shape[1]
        wanted = (features,) if up is not None else (features, 2 * features)
        require(width in wanted, f"gate_up has {width} rows, but down has {features} columns")
        return
    there = [[t is not None for t in tensors] for tensors in (codes, scales)]
    require(
        (gate_up, up, down) == (None, None, None)
        and there[0] == there[1]
        and there[0][0]
        and there[0][2],
        f"wanted codes and scales of gate_up and down, and no matrices, for format {format}",
    )
    for shape, *tensors in zip(_shapes(codes[1] is not None, **given), codes, scales):
        if shape is not None:
            numbers = format, given["block_size"], given["nested"]
            require_fit(*tensors, *shape, *numbers)


def _shapes(
    is_apart: bool, features: int, gated: bool, x: Any = None, dy: Any = None, **_: Any
) -> tuple[Any, ...]:
    """Returns the shapes of ``MATRICES`` of few bits."""
    rows = dy if x is None or dy is not None else x
    hidden = getattr(rows, "shape", rows)[-1]  # a tensor, or its shape
    up = (features, hidden) if is_apart else None
    return (2 * features if gated and not is_apart else features, hidden), up, (hidden, features)


def _matrices(**given: Any) -> tuple[Any, ...]:
    """Returns the shapes of ``MATRICES``, from tensors or from their shapes."""
    if given["format"] == 0:
        return tuple(getattr(given[name], "shape", given[name]) for name in MATRICES)
    return _shapes(given["up_codes"] is not None, **given)


def _results(x, norm, save, wanted, **given):
    (width, _), up, (hidden, features) = _matrices(x=x, **given)
    tokens, gated = prod(x.shape[:-1]), up is not None or width != features
    kept = kept_for(save, wanted)

    def rows(name: str, cols: int) -> Tensor:
        return x.new_empty((tokens, cols) if kept[name] else (0,))

    def statistics(is_kept: bool) -> Tensor:
        return x.new_empty(tokens if is_kept else 0, dtype=torch.float32)

    return (
        x.new_empty(x.shape),
        statistics(kept["x"] and norm == NORMS["layer"]),
        statistics(kept["x"]),
        rows("normed", hidden),
        rows("gates", 2 * features if gated else features),
        rows("activated", features),
    )


def _gradients(dy, gradients, norm_weight, norm_bias, **given):
    gate_up, up, down = _matrices(dy=dy, **given)
    few_bits = given["format"] != 0
    require(not (few_bits and gradients & (GATE_UP | DOWN)), "a matrix of few bits has no gradient")
    like_norm = next((t for t in (norm_weight, norm_bias) if t is not None), dy)

    def empty(bit: int, shape: Sequence[int], like: Tensor = dy, given: bool = True) -> Tensor:
        return like.new_empty(tuple(shape) if gradients & bit and given else (0,))

    hidden, apart = dy.shape[-1:], up is not None
    up_shape = up if apart else (0,)
    return (
        empty(X | NORM_WEIGHT | NORM_BIAS, dy.shape),
        empty(NORM_WEIGHT, hidden, like_norm),
        empty(NORM_BIAS, hidden, like_norm),
        empty(GATE_UP, gate_up),
        empty(GATE_UP, up_shape, given=apart),
        empty(DOWN, down),
        empty(GATE_UP_BIAS, gate_up[:1]),
        empty(GATE_UP_BIAS, up_shape[:1], given=apart),
        empty(DOWN_BIAS, hidden),
    )


def _products(**given) -> tuple[int, int]:
    """Returns FLOPs per token of gate and up, and of down."""
    gate_up, up, down = _matrices(**given)
    gates = 2 * prod(gate_up) + (2 * prod(up) if up is not None else 0)
    return gates, 2 * prod(down)


def _flops(x, **given) -> int:
    return prod(x[:-1]) * sum(_products(x=x, **given))


def _gates_again(dy, gates, activated, gradients, **given) -> int:
    """Returns the work of gate and up, which are evaluated again if they were not kept."""
    evaluates = bool(gradients & THROUGH or (gradients & DOWN and not prod(activated)))
    return prod(dy[:-1]) * _products(dy=dy, **given)[0] * (evaluates and not prod(gates))


def _backward_flops(dy, gradients, **rest) -> int:
    gates, inner = _products(dy=dy, **rest)
    total = inner * (bool(gradients & THROUGH) + bool(gradients & DOWN))
    total += gates if gradients & GATE_UP else 0
    total += gates if gradients & (X | NORM_WEIGHT | NORM_BIAS) else 0
    return prod(dy[:-1]) * total + _gates_again(dy, gradients=gradients, **rest)


def _saved(given: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Tensor | None]:
    return {} if kept_for(given["save"], given["wanted"])["x"] else {"x": None}


row_op(
    "mlp_block",
    _KINDS,
    check=_check,
    results=_results,
    gradients=_gradients,
    saved=_saved,
    scalars=lambda given, needs: {"gradients": wanted_gradients(list(needs.values())[:TENSORS])},
    flops=_flops,
    backward_flops=_backward_flops,
    again=_gates_again,
)
