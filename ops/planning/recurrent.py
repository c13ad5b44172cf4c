"""What an LSTM allocates on the CPU, where torch hands each layer to oneDNN.

The fakes of ``aten::mkldnn_rnn_layer`` have an empty workspace, though it is the largest tensor of
such a model. The bodies here repeat torch's ``mkldnn/RNN.cpp`` and ideep's ``lstm.hpp``, and their
sizes are those of oneDNN's ``cpu/rnn/rnn_utils.hpp``. All other recurrent layers, and an LSTM that
has projections or packed sequences, are made of operations that fakes show as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .inside import BODIES
from .probe import scratch

__all__ = ["has_recurrent_layers"]

ROOM = 1 << 20  # bytes, beside twice those wanted, of a workspace that a real kernel is given
PAGE = 4096  # to which oneDNN rounds each part of a workspace and of its scratchpad
GATES = 4
_FORWARD = torch.ops.aten.mkldnn_rnn_layer.default
_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


def has_recurrent_layers(model: nn.Module) -> bool:
    """Whether a model has an RNN, GRU or LSTM."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _good_ld(columns: int, size: int) -> int:
    """The columns of a row of oneDNN's, for elements of so many bytes: rnn_utils, get_good_ld."""
    step = 64 // size
    found = -(-columns // step) * step
    return found + step if found % 256 == 0 else found


def _pages(*parts: int) -> int:
    """The bytes of parts that each begin at a page."""
    return sum(-(-part // PAGE) * PAGE for part in parts)


@dataclass(frozen=True)
class _Layer:
    """A layer of an LSTM in one direction, as ``rnn_conf_t`` of oneDNN describes it."""

    steps: int
    rows: int  # of a step: the batch
    inputs: int
    hidden: int
    size: int  # bytes of an element

    @classmethod
    def of(cls, x: Tensor, hx: Tensor) -> _Layer:
        """Describes the layer of an input ``[steps, rows, inputs]``."""
        steps, rows, inputs = x.shape
        return cls(steps, rows, inputs, hx.shape[-1], x.element_size())

    def _states(self, size: int) -> int:
        """Bytes of the states before and after each step, of the layer and of what is below."""
        columns = _good_ld(max(self.inputs, self.hidden), size)
        return 2 * (self.steps + 1) * self.rows * columns * size

    def _cells(self, size: int) -> int:
        """Bytes of the cells before and after each step: they are in no product, and dense."""
        return 2 * (self.steps + 1) * self.rows * self.hidden * size

    @property
    def workspace(self) -> int:
        """What a forward pass leaves for the backward pass: set_workspace_sizes, set_offsets."""
        rows, size = self.steps * self.rows, self.size
        return _pages(
            rows * _good_ld(GATES * self.hidden, size) * size,
            rows * _good_ld(self.hidden, size) * size,
            self._states(size),
            self._cells(size),
            self._states(4),  # gradients of states, for the layer below
            self._states(4),  # and for the step before
            self._cells(4),
        )

    def _has_blocks(self, trains: bool) -> bool:
        """Whether oneDNN has kernels that read weights in blocks, which it uses for 16-bit numbers
        and without a backward pass: init_brgemm."""
        if self.size == 4:
            return not trains and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        return torch.cpu._is_avx512_bf16_supported()

    def _is_merged(self, trains: bool, is_forward: bool) -> bool:
        """Whether one product is of all steps: init_conf, configure_brgemm."""
        if self._has_blocks(trains):
            return is_forward and self.rows == 1
        return not is_forward or self.rows < 128

    def scratchpad(self, trains: bool, is_forward: bool) -> int:
        """What lives during a pass; of kernels with blocks, all but some lists.

        Args:
            trains: whether there is a workspace; without one, its states are in the scratchpad.
            is_forward: whether the pass is.
        """
        wide = 4 if is_forward else self.size  # products are summed in 32 bits, gradients rounded
        gates = self.rows * _good_ld(GATES * self.hidden, wide) * wide
        parts = [gates * (self.steps if self._is_merged(trains, is_forward) else 1)]
        parts.append(self.rows * _good_ld(self.hidden, self.size) * self.size)
        if trains:
            parts.append(self.rows * _good_ld(self.hidden, 4) * 4)
        else:
            parts += [self._states(self.size), self._cells(self.size)]
        # ref_rnn.cpp, init_scratchpad: room to begin at a page, and four lists of pointers.
        found = _pages(*parts) + PAGE + 3 * (8 + 128) + (4 * 8 + 128)
        if self._has_blocks(trains) and not is_forward:  # rnn_brgemm_utils.cpp, init_scratchpad
            columns = 32 * torch.get_num_threads() + self.inputs + self.hidden
            found += columns * (self.rows + self.rows % 2) * self.size
        return found

    def weights(self, inputs: int, trains: bool, is_forward: bool) -> int:
        """Bytes of a copy of weights ``[gates, hidden, inputs]`` in the layout of a pass, or 0 if
        they have that already: set_expected_desc."""
        if self._has_blocks(trains):  # of 32 and, for 16-bit numbers, pairs
            large, small = (self.hidden, inputs) if is_forward else (inputs, self.hidden)
            pair = 4 // self.size
            return GATES * -(-large // 32) * 32 * -(-small // pair) * pair * self.size
        if is_forward:
            columns = _good_ld(GATES * self.hidden, self.size)
            return 0 if inputs == 1 else inputs * columns * self.size
        columns = _good_ld(inputs, self.size)
        return 0 if columns == inputs else GATES * self.hidden * columns * self.size

    def gradients(self, inputs: int) -> int:
        """Bytes of the gradient of weights as ``[inputs, gates, hidden]``, in 32 bits."""
        columns = GATES * self.hidden  # a single row needs no gap to the next
        return inputs * (columns if inputs == 1 else _good_ld(columns, 4)) * 4


def _forward(
    x: Tensor,
    w0: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    hx: Tensor,
    cx: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    """The fake of a layer: its results, its state and cell, and its workspace."""
    layer, trains = _Layer.of(x, hx), torch.is_grad_enabled()
    output = x.new_empty(layer.steps, layer.rows, layer.hidden)
    hy, cy = torch.empty_like(hx), torch.empty_like(cx)
    workspace = x.new_empty(layer.workspace if trains else 0, dtype=torch.uint8)
    found = None
    if x.device.type == "cpu" and not (trains and x.dtype == torch.float32):
        found = scratch(_FORWARD, (x, w0, w1, w2, w3, hx, cx, *options), {})
    if found is None:
        found = GATES * layer.hidden * layer.size  # the sum of the biases
        for inputs in (layer.inputs, layer.hidden):
            found += layer.weights(inputs, trains, is_forward=True)
        found += layer.scratchpad(trains, is_forward=True)
    x.new_empty(found, dtype=torch.uint8)
    return output, hy, cy, workspace


def _backward(
    x: Tensor,
    w0: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    hx: Tensor,
    cx: Tensor,
    output: Tensor,
    hy: Tensor,
    cy: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    """The fake of a layer's backward pass: gradients of input, weights, biases, state and cell."""
    layer = _Layer.of(x, hx)
    biases = GATES * layer.hidden

    def result(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    results = (
        result(*x.shape), result(*w0.shape), result(*w1.shape), result(biases),
        result(*hx.shape), result(*cx.shape),
    )  # fmt: skip
    dx, dw0, dw1, db, dhx, dcx = results
    found = None
    if x.device.type == "cpu" and x.dtype != torch.float32:
        given = (grad_output, grad_hy, grad_cy)
        *others, workspace = options
        with _disable_current_modes():  # torch checks no size, and other processors may need more
            roomy = torch.empty(2 * workspace.numel() + ROOM, dtype=torch.uint8, device="meta")
        args = (x, w0, w1, w2, w3, hx, cx, output, hy, cy, *given, *others, roomy)
        found = scratch(_BACKWARD, args, {})
        if found is not None:
            found += 4 * biases  # it counts from where there are two gradients of the biases
    if found is None:
        found = biases * (layer.size + 4)  # their sum, and its gradient
        for inputs in (layer.inputs, layer.hidden):
            found += layer.weights(inputs, True, is_forward=False) + layer.gradients(inputs)
        found += layer.scratchpad(trains=True, is_forward=False)
        for grad, like in ((grad_output, output), (grad_hy, hx), (grad_cy, cx)):
            if grad is None or not grad.is_contiguous():
                found += like.numel() * like.element_size()
            if like.dtype != torch.float32:
                found += like.numel() * 4
    x.new_empty(found, dtype=torch.uint8)
    return dx, dw0, dw1, db, result(biases), dhx, dcx


BODIES["aten::mkldnn_rnn_layer"] = _forward
BODIES["aten::mkldnn_rnn_layer_backward"] = _backward
