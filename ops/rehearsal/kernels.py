"""Operations that only CUDA has, written for the CPU: by their names, with torch's arguments."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import _draws
from .attention import ATTENTION

aten = torch.ops.aten


# ---- Products, softmax and convolutions ---------------------------------------------------------


def _product(f, *args, **kwargs):
    """Returns a product of 16-bit matrices in the dtype that the last argument says."""
    *tensors, dtype = args
    return f(*(t.to(dtype) for t in tensors), **kwargs)


def _softmax(f, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return f(x.float() if half_to_float else x, dim, False)


def _softmax_backward(f, grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return f(grad, out, dim, grad.dtype if dtype != grad.dtype else dtype)


def _depthwise(x, weight, size, bias, stride, padding, dilation):
    nothing = [0] * len(size)
    return aten.convolution(x, weight, bias, stride, padding, dilation, False, nothing, x.size(1))


def _histogram(f, x: Tensor, *args, **kwargs) -> Tensor:
    """Counts whole numbers, too."""
    return f(x if x.is_floating_point() else x.double(), *args, **kwargs).to(x.dtype)


def _into(f, *args, out: Tensor, **kwargs) -> Tensor:
    """Writes the result of ``f`` into ``out``."""
    result = f(*args, **kwargs)
    return out.resize_(result.shape).copy_(result)


# ---- Dropout and norms --------------------------------------------------------------------------


def _fused_dropout(x: Tensor, p: float, generator=None, *, state):
    kept = torch.empty(x.shape).bernoulli_(p, generator=_draws.generator(state))
    return x * kept.div(p).to(x.dtype), kept.to(torch.uint8)


def _masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return x * mask * scale


def _rms_norm_backward(grad, x, shape, rstd, weight, mask):
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    outer = tuple(range(x.dim() - len(shape)))
    g, normed = grad.float(), x.float() * rstd.float()
    scaled = g if weight is None else g * weight.float()
    of_x = (scaled - normed * (scaled * normed).mean(dims, keepdim=True)) * rstd.float()
    of_weight = (g * normed).sum(outer) if outer else g * normed
    return of_x if mask[0] else None, of_weight if mask[1] and weight is not None else None


def _batch_norm(f, x, weight, bias, mean, variance, training, momentum, eps):
    """Returns the statistics that normalized, in evaluation too, as CUDA's kernel does."""
    found = f(x, weight, bias, mean, variance, training, momentum, eps)
    if training or mean is None:
        return found
    return found[0], mean, torch.rsqrt(variance.float() + eps)


def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """Makes the buffer again, which CUDA's kernel does not need."""
    return aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1])


def _embedding_bag(f, weight: Tensor, indices: Tensor, offsets: Tensor, *rest, **kwargs):
    """Returns to which bag each index belongs and the sizes of bags, which the CPU may not need."""
    out, bags, sizes, maxima = f(weight, indices, offsets, *rest, **kwargs)
    at = torch.arange(indices.numel(), dtype=offsets.dtype)
    if bags.numel() != indices.numel():
        bags = torch.searchsorted(offsets, at, right=True) - 1
    if sizes.numel() != offsets.numel():
        sizes = torch.bincount(bags, minlength=offsets.numel())
    return out, bags, sizes, maxima


def _channels(t: Tensor, x: Tensor) -> Tensor:
    """Returns a value for each channel in the shape that broadcasts over ``x``."""
    return t.float().view(1, -1, *[1] * (x.dim() - 2))


def _other_dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _batch_norm_stats(x: Tensor, eps: float):
    variance, mean = torch.var_mean(x.float(), _other_dims(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


def _batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    y = (x.float() - _channels(mean, x)) * _channels(invstd, x)
    y = y if weight is None else y * _channels(weight, x)
    return y if bias is None else y + _channels(bias, x)


def _batch_norm_gather(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    n = counts.float().view(-1, 1) if isinstance(counts, Tensor) else torch.full_like(mean, counts)
    total = n.sum(0)
    together = (mean * n).sum(0) / total
    squares = ((invstd.pow(-2) - eps + (mean - together).square()) * n).sum(0)
    # Not in the schema, but CUDA's kernel writes these two.
    if running_mean is not None:
        running_mean.lerp_(together.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return together, torch.rsqrt(squares / total + eps)


def _batch_norm_backward_reduce(grad, x, mean, invstd, weight, of_input, of_weight, of_bias):
    g, dims = grad.float(), _other_dims(x)
    total = g.sum(dims)
    products = (g * (x.float() - _channels(mean, x))).sum(dims)
    return (
        total if of_input else None,
        products if of_input else None,
        products * invstd if of_weight else None,
        total if of_bias else None,
    )


def _batch_norm_backward_elemt(grad, x, mean, invstd, weight, total, products, count):
    n, scale = count.sum(), _channels(invstd, x)
    centered = (x.float() - _channels(mean, x)) * scale.square() * _channels(products, x) / n
    g = (grad.float() - _channels(total, x) / n - centered) * scale
    return g if weight is None else g * _channels(weight, x)


# ---- Cells of recurrent networks ----------------------------------------------------------------


def _lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    of_cell = hy * o * (1 - t * t) + (0 if grad_cy is None else grad_cy)
    parts = of_cell * g * i * (1 - i), of_cell * cx * f * (1 - f), of_cell * i * (1 - g * g)
    gates = torch.cat([*parts, hy * t * o * (1 - o)], 1)
    return gates, of_cell * f, gates.sum(0) if has_bias else None


def _gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, new), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (new + r * hn).tanh()
    return new + z * (hx - new), torch.cat([r, z, new, hx, hn], 1)


def _gru_cell_backward(grad, workspace, has_bias):
    r, z, new, hx, hn = workspace.chunk(5, 1)
    of_new = grad * (1 - z) * (1 - new * new)
    of_z, of_r = grad * (hx - new) * z * (1 - z), of_new * hn * r * (1 - r)
    input_gates = torch.cat([of_r, of_z, of_new], 1)
    hidden_gates = torch.cat([of_r, of_z, of_new * r], 1)
    sums = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, grad * z, *sums


_FUNCTIONAL = {
    **{f"{n}.dtype": functools.partial(_product, getattr(torch, n)) for n in ("mm", "bmm")},
    **{f"{n}.dtype": functools.partial(_product, getattr(torch, n)) for n in ("addmm", "baddbmm")},
    "_softmax": functools.partial(_softmax, aten._softmax),
    "_log_softmax": functools.partial(_softmax, aten._log_softmax),
    "_softmax_backward_data": functools.partial(_softmax_backward, aten._softmax_backward_data),
    "_log_softmax_backward_data": functools.partial(
        _softmax_backward, aten._log_softmax_backward_data
    ),
    "_conv_depthwise2d": _depthwise,
    "histc": functools.partial(_histogram, aten.histc),
    "batch_norm_elemt": _batch_norm_elemt,
}
_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")
_NORMS = ("native_batch_norm", "_native_batch_norm_legit")

KERNELS = {
    **ATTENTION,
    **_FUNCTIONAL,
    **{
        f"{name}_out" if "." in name else f"{name}.out": functools.partial(_into, f)
        for name, f in _FUNCTIONAL.items()
    },
    **{name: functools.partial(_batch_norm, getattr(aten, name)) for name in _NORMS},
    **{name: functools.partial(_embedding_bag, getattr(aten, name)) for name in _BAGS},
    "log_sigmoid_backward": _log_sigmoid_backward,
    "conv_depthwise3d": _depthwise,
    "_fused_dropout": _fused_dropout,
    "_masked_scale": _masked_scale,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats": _batch_norm_gather,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
