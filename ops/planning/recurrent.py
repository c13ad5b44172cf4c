"""Plans LSTMs on the CPU, where torch hands each layer to oneDNN.

The fakes of ``aten::mkldnn_rnn_layer`` have an empty workspace, though it is the largest tensor of
such a model. A layer is run once on zeros to see it. What is too large for that is estimated. All
other recurrent layers, and an LSTM that has projections or packed sequences, are made of operations
that fakes show as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .op_workspaces import BODIES
from .probe import asked

__all__ = ["LAYERS", "has_recurrent_layers"]

_FORWARD = torch.ops.aten.mkldnn_rnn_layer.default
_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_ROOM = 1 << 20  # bytes, beside twice those planned, of a workspace that a real kernel is given


def has_recurrent_layers(model: nn.Module) -> bool:
    """Returns whether a model has an RNN, GRU or LSTM."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _states(x: Tensor, hidden: int, size: int) -> int:
    """Returns the bytes of the states and cells around all steps, in numbers of ``size`` bytes."""
    steps, rows, inputs = x.shape
    return 2 * (steps + 1) * rows * (max(inputs, hidden) + hidden) * size


def _estimated_workspace(x: Tensor, hidden: int) -> int:
    """Returns about the bytes that a forward pass leaves: gates, results, states and cells of all
    steps, and gradients in 32 bits. oneDNN's rows have gaps besides."""
    steps, rows, inputs = x.shape
    size = x.element_size()
    kept = 5 * steps * rows * hidden * size + _states(x, hidden, size) + _states(x, hidden, 4)
    return kept + 2 * (steps + 1) * rows * max(inputs, hidden) * 4


def _estimated_scratch(x: Tensor, hidden: int, size: int) -> int:
    """Returns about the bytes that a pass holds besides: weights in another layout and their
    gradients, of so many bytes each, and gates."""
    steps, rows, inputs = x.shape
    return 4 * hidden * ((inputs + hidden + 2) * size + steps * rows * x.element_size())


def _forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Makes the results of a layer on fakes: its output, its state and cell, and its workspace."""
    hx, cx, trains = rest[4], rest[5], torch.is_grad_enabled()
    hidden = hx.shape[-1]
    found = asked(_FORWARD, (x, *rest), {}) if x.device.type == "cpu" else None
    if found is None:
        extra = _estimated_scratch(x, hidden, x.element_size())
        extra += 0 if trains else _states(x, hidden, x.element_size())
        found = extra, (_estimated_workspace(x, hidden),)
    scratch, sizes = found
    results = x.new_empty(*x.shape[:2], hidden), torch.empty_like(hx), torch.empty_like(cx)
    workspace = x.new_empty(sizes[-1] if trains else 0, dtype=torch.uint8)
    x.new_empty(scratch, dtype=torch.uint8)
    return *results, workspace


def _backward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Makes the gradients of input, weights, biases, state and cell on fakes."""
    w0, w1, hx, cx, workspace = rest[0], rest[1], rest[4], rest[5], rest[-1]
    biases = 4 * hx.shape[-1]
    dx, dw0, dw1, dhx, dcx = (
        x.new_empty(like.shape, dtype=torch.float32) for like in (x, w0, w1, hx, cx)
    )
    db = x.new_empty(biases, dtype=torch.float32)
    found = None
    if x.device.type == "cpu":
        with _disable_current_modes():  # torch checks no size, and an estimate may be too small
            roomy = torch.empty(2 * workspace.numel() + _ROOM, dtype=torch.uint8, device="meta")
        found = asked(_BACKWARD, (x, *rest[:-1], roomy), {})
    # The gradient of the biases is one tensor until the scratch memory is free.
    extra = _estimated_scratch(x, hx.shape[-1], x.element_size() + 4) if found is None else found[0]
    x.new_empty(extra + 4 * biases, dtype=torch.uint8)
    return dx, dw0, dw1, db, torch.empty_like(db), dhx, dcx


LAYERS = {"aten::mkldnn_rnn_layer": _forward, "aten::mkldnn_rnn_layer_backward": _backward}
BODIES |= LAYERS
