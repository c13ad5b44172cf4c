"""Gated linear units and activations with gradients: ``headroom::glu``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.checks import check_choice, check_flags
from .._core.registration import require
from .._core.row_ops import MATRIX, kind, row_op
from .._core.rows import check_tensors, promoted

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu_squared": 4}


def glu(
    gate: Tensor, up: Tensor | None = None, activation: str = "silu", *, packed: bool = False
) -> Tensor:
    """Returns ``activation(gate) * up``, or ``activation(gate)`` without ``up``.

    Keeps gate and up alone for the backward pass, which reads each once and writes both gradients.
    Everything between is float32, and the result is rounded once: the same bits on every device.

    Args:
        gate: float32, bfloat16 or float16 ``[..., cols]``, of any strides.
        up: like ``gate``; None for the activation alone.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, with erf), "gelu_tanh", "relu" (ReGLU) or
            "relu_squared".
        packed: whether ``gate`` is ``[..., 2 * cols]`` and holds gate and up side by side, as one
            matrix product gives them. Its gradient is then one tensor too.

    Returns:
        A contiguous tensor ``[..., cols]``, of the dtype of ``gate``.

    Raises:
        ValueError: ``activation`` is none of the five, or ``up`` is given with ``packed``.
        RuntimeError: another argument does not fit.

    The formula and its source are documented at ``hr_glu_forward`` in ``headroom.h``.
    """
    check_tensors(gate=gate)
    check_flags(packed=packed)
    check_choice("activation", activation, ACTIVATIONS)
    if packed and up is not None:
        raise ValueError("up is given, but with packed=True the second half of gate is up")
    if up is not None:
        gate, up = promoted(gate, up)
    return torch.ops.headroom.glu(gate, up, ACTIVATIONS[activation], packed)


def _sizes(gate: Tensor, packed: bool, **_: Any) -> dict[str, Any]:
    cols = gate.shape[-1]
    require(not packed or cols % 2 == 0, f"gate has {cols} columns, wanted an even number")
    return {"inner": cols // 2 if packed else cols}


row_op("glu", {"gate": MATRIX, "up": MATRIX, "h": kind("rows inner")}, sizes=_sizes)
