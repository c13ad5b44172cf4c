"""Attention in 16 bits on processors that have no instructions for products of these."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._core.rows import autocast_dtype
from .._core.surroundings import takes_ops
from ..functional.linear import SLOW_ON_CPU

_aten = torch.ops.aten


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Returns torch's ``scaled_dot_product_attention`` of grouped heads.

    On the CPU in a dtype that torch has no fast product for, the gradient of FlashAttention is
    computed in float32, where torch's takes 3 to 7 times as long. What is kept, and the result, are
    torch's.
    """
    if dropout == 0 and _is_slow_flash(q, k, v, mask):
        return _Flash.apply(q, k, v, mask, causal, scale)
    return F.scaled_dot_product_attention(
        *(q, k, v, mask),
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=k.shape[-3] != q.shape[-3],
    )


def _is_slow_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Returns whether torch would choose FlashAttention in such a dtype, with a gradient."""
    return (
        q.dtype in SLOW_ON_CPU
        and q.device.type == "cpu"
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch.backends.cuda.flash_sdp_enabled()
        and autocast_dtype("cpu") in (None, q.dtype)
        and all(takes_ops(x) and x.dtype == q.dtype and x.numel() for x in (q, k, v))
        and all(x.dim() == 4 and x.stride(-1) == 1 for x in (q, k, v))
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and (mask is None or (not mask.requires_grad and mask.dtype == q.dtype))
        and (mask is None or mask.dim() in (2, 4))
    )


class _Flash(torch.autograd.Function):
    """FlashAttention of torch, with its gradient in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *options: Any) -> Tensor:
        causal, scale = ctx.options = options
        out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *rows, sums, mask = ctx.saved_tensors
        causal, scale = ctx.options
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.float() for x in (grad, *rows)),
            *(sums, 0.0, causal),
            attn_mask=None if mask is None else mask.float(),
            scale=scale,
        )
        return *(g.to(grad.dtype) for g in grads), None, None, None
