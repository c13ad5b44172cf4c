"""The ops with a gradient: a row each, which `test_autograd_table.py` runs through every way to a
gradient. A new op needs an entry in `OPS` and no test of these ways of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from headroom import linear_cross_entropy, linear_log_prob
from headroom.functional import (
    cross_entropy,
    dequantize_matrix,
    divergence,
    experts,
    gemm,
    glu,
    layer_norm,
    linear_quantized,
    lora_linear,
    quantize_matrix,
    rms_norm,
    rope,
    rope_tables,
    sink_attention,
)
from headroom.loss import linear_distillation_loss
from headroom.nn.functional import mlp_block
from torch import Tensor

from helpers.divergences import reference

ROWS, COLS = 6, 32


@dataclass(frozen=True)
class DifferentiableOp:
    """Functions take the tensors that have gradients and return a tensor, or a tuple of them."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    reference: Callable[..., Tensor | tuple[Tensor, ...]]  # the same in torch, of any dtype
    shapes: tuple[tuple[int, ...], ...]  # the first is [ROWS, COLS]: rows of samples
    twice: bool = False  # whether it has a second derivative
    keeps_inputs: bool = True  # whether the backward pass reads one of them

    def inputs(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
        """Leaves that require grad."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(shape, generator=generator).to(device=device, dtype=dtype).requires_grad_()
            for shape in self.shapes
        ]


def _log_probs_reference(logits, target):
    logp = logits.log_softmax(-1)
    return -F.nll_loss(logp, target, reduction="none"), -(logp.exp() * logp).sum(-1)


def _rms_reference(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps=1e-6)


def _rms_sum_reference(x, residual, weight):
    return _rms_reference(x + residual, weight), x + residual


def _layer_reference(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype))


def _layer_sum_reference(x, residual, weight, bias):
    return _layer_reference(x + residual, weight, bias), x + residual


def _targets(logits):
    return torch.arange(len(logits), device=logits.device) * 5 % COLS


def _tables(q):
    return rope_tables(COLS, 4, device=q.device)


def _rotated(x, cos, sin):
    first, second = x.unsqueeze(1).chunk(2, -1)
    cos, sin = cos[3].to(x.dtype), sin[3].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _linear(x, weight, bias=None):
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


_QUANTIZED = quantize_matrix(torch.randn(8, COLS, generator=torch.Generator().manual_seed(1)) / 8)


def _quantized(x):
    codes, scales = _QUANTIZED.codes.to(x.device), _QUANTIZED.scales.to(x.device)
    return replace(_QUANTIZED, codes=codes, scales=scales)


def _mlp_reference(x, norm_weight, gate_up, down):
    gate, up = (_rms_reference(x, norm_weight) @ gate_up.T.to(x.dtype) / 8).chunk(2, -1)
    return x + (F.silu(gate) * up) @ down.T.to(x.dtype) / 8


def _index(x):
    rows = torch.arange(len(x), device=x.device)
    return torch.stack((rows % 3, (rows + 1) % 4), -1)  # of four experts


def _sinks_reference(q, k, v, sinks):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    every = torch.cat((scores.masked_fill(hidden, float("-inf")), column), -1)
    return every.softmax(-1)[..., :-1] @ v


def _experts_reference(x, weight, gate_up, down):
    y = torch.zeros_like(x)
    for e in range(4):
        gate, up = (x @ gate_up[e].T.to(x.dtype) / 8).chunk(2, -1)
        own = (weight.to(x.dtype) * (_index(x) == e)).sum(-1, keepdim=True)
        y = y + own * ((F.silu(gate) * up) @ down[e].T.to(x.dtype) / 8)
    return y


_ROWS, _VECTOR, _FEATURES = (ROWS, COLS), (COLS,), 12
OPS = [
    DifferentiableOp("rms_norm", rms_norm, _rms_reference, (_ROWS, _VECTOR)),
    DifferentiableOp(
        "rms_norm of a sum",
        lambda x, residual, weight: rms_norm(x, weight, residual=residual),
        _rms_sum_reference,
        (_ROWS, _ROWS, _VECTOR),
    ),
    DifferentiableOp("layer_norm", layer_norm, _layer_reference, (_ROWS, _VECTOR, _VECTOR)),
    DifferentiableOp(
        "layer_norm of a sum",
        lambda x, residual, weight, bias: layer_norm(x, weight, bias, residual=residual),
        _layer_sum_reference,
        (_ROWS, _ROWS, _VECTOR, _VECTOR),
    ),
    DifferentiableOp("glu", glu, lambda gate, up: F.silu(gate) * up, (_ROWS, _ROWS)),
    DifferentiableOp(
        "glu of a packed tensor",
        lambda both: glu(both, packed=True, activation="gelu"),
        lambda both: F.gelu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
        (_ROWS,),
    ),
    DifferentiableOp(
        "rope",
        lambda q, k: rope(q.unsqueeze(1), k.unsqueeze(1), *_tables(q), offset=3),
        lambda q, k: tuple(_rotated(x, *_tables(q)) for x in (q, k)),
        (_ROWS, (2, COLS)),
        twice=True,
        keeps_inputs=False,
    ),
    DifferentiableOp("gemm", gemm, lambda a, b: a @ b.to(a.dtype), (_ROWS, (COLS, 8)), twice=True),
    DifferentiableOp(
        "linear_quantized",
        lambda x, bias: linear_quantized(x, _quantized(x), bias),
        lambda x, bias: _linear(x, dequantize_matrix(_quantized(x)), bias),
        (_ROWS, (8,)),
        twice=True,
        keeps_inputs=False,
    ),
    DifferentiableOp(
        "lora_linear",
        lambda x, bias, a, b: lora_linear(x, _quantized(x), bias, a, b, scale=0.5) / 8,
        lambda x, bias, a, b: (
            (_linear(x, dequantize_matrix(_quantized(x)), bias) + _linear(_linear(x, a), b) / 2) / 8
        ),
        (_ROWS, (8,), (3, COLS), (8, 3)),
    ),
    DifferentiableOp(
        "cross_entropy",
        lambda z: cross_entropy(z, _targets(z), reduction="none", label_smoothing=0.1),
        lambda z: F.cross_entropy(z, _targets(z), reduction="none", label_smoothing=0.1),
        (_ROWS,),
    ),
    DifferentiableOp(
        "divergence",
        lambda z: divergence(z, z.detach().flip(-1), divergence="js", reduction="none"),
        lambda z: reference(z, z.detach().flip(-1), "js"),
        (_ROWS,),
    ),
    DifferentiableOp(
        "linear_distillation_loss",
        lambda x, weight: linear_distillation_loss(
            x,
            weight,
            x.detach().flip(-1),
            weight.detach(),
            divergence="reverse_kl",
            reduction="none",
            workspace=2048,
        ),  # fmt: skip
        lambda x, weight: reference(
            x @ weight.T.to(x.dtype), x.detach().flip(-1) @ weight.detach().T.to(x.dtype), "reverse"
        ),
        (_ROWS, (60, COLS)),
    ),
    DifferentiableOp(
        "linear_distillation_loss of all rows",
        lambda x, weight: linear_distillation_loss(
            x, weight, x.detach().flip(-1), weight.detach(), workspace=2048
        ),
        lambda x, weight: reference(
            x @ weight.T.to(x.dtype), x.detach().flip(-1) @ weight.detach().T.to(x.dtype), "forward"
        ).mean(),
        (_ROWS, (60, COLS)),
        keeps_inputs=False,
    ),
    DifferentiableOp(
        "linear_cross_entropy",
        lambda x, weight, bias: linear_cross_entropy(x, weight, _targets(x), bias),
        lambda x, weight, bias: F.cross_entropy(_linear(x, weight, bias), _targets(x)),
        (_ROWS, (COLS, COLS), _VECTOR),
        keeps_inputs=False,
    ),
    DifferentiableOp(
        "linear_cross_entropy of rows",
        lambda x, w: linear_cross_entropy(x, w, _targets(x), reduction="none", softcap=9.0),
        lambda x, w: F.cross_entropy(9 * (_linear(x, w) / 9).tanh(), _targets(x), reduction="none"),
        (_ROWS, (COLS, COLS)),
    ),
    DifferentiableOp(
        "linear_log_prob and entropies",
        lambda x, w: linear_log_prob(x, w, _targets(x), return_entropy=True),
        lambda x, w: _log_probs_reference(_linear(x, w), _targets(x)),
        (_ROWS, (COLS, COLS)),
    ),
    DifferentiableOp(
        "linear_cross_entropy of 4 bits",
        lambda x, bias: linear_cross_entropy(x, _quantized(x), _targets(x) % 8, bias),
        lambda x, bias: F.cross_entropy(
            _linear(x, dequantize_matrix(_quantized(x)), bias), _targets(x) % 8
        ),
        (_ROWS, (8,)),
        keeps_inputs=False,
    ),
    DifferentiableOp(
        "mlp_block",
        lambda x, norm_weight, gate_up, down: mlp_block(x, norm_weight, gate_up / 8, down / 8),
        _mlp_reference,
        (_ROWS, _VECTOR, (2 * _FEATURES, COLS), (COLS, _FEATURES)),
    ),
    DifferentiableOp(
        "experts",
        lambda x, weight, gate_up, down: experts(x, _index(x), weight, gate_up / 8, down / 8),
        _experts_reference,
        (_ROWS, (ROWS, 2), (4, 2 * _FEATURES, COLS), (4, COLS, _FEATURES)),
    ),
    DifferentiableOp(
        "sink_attention",
        sink_attention,
        _sinks_reference,
        ((2, 4, ROWS, 8), (2, 2, ROWS, 8), (2, 2, ROWS, 8), (4,)),
    ),
]
