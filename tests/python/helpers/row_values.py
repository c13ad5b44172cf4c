"""Values and gradients of ops on rows against float64 and torch."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((5, 7), (2, 3, 640), (33, 1025), (1, 1))


def rows_of(count, shape, dtype, device, seed=0):
    """Tensors of noise."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(count)]


def gradients(function, inputs, dy):
    """The result, and the gradients of the inputs from that of the result."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(dy.to(y.dtype))
    return y.detach(), *(t.grad for t in inputs)


def assert_as_good(ours, theirs, exact, dtypes):
    """At most twice torch's error against float64, with one rounding of the largest value free.
    The dtypes are those of the outputs, or one for all."""
    dtypes = [dtypes] * len(exact) if isinstance(dtypes, torch.dtype) else dtypes
    for k, (got, other, value, dtype) in enumerate(zip(ours, theirs, exact, dtypes, strict=True)):
        unit = torch.finfo(dtype).eps * value.abs().max().item() / 2
        error, limit = ((t.double() - value).abs().max().item() for t in (got, other))
        assert error <= 2 * limit + unit, f"output {k}: {error} against {limit}"
