"""Attention of heads by the kernel that fits the pattern, the dtype and the device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._core.rows import autocast_dtype, cast
from .._core.surroundings import constant_in_graphs, takes_ops
from ..functional.attention_segments import ends_of, groups_of, pieces_of
from ..functional.attention_sinks import allows_flash
from ..functional.linear import SLOW_ON_CPU
from .pattern import Pattern, masked

_aten = torch.ops.aten


def _plain(function: Callable[..., Any], *inputs: Tensor) -> Any:
    return function(*inputs)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    run: Callable[..., Any] = _plain,
) -> Tensor:
    """Returns ``softmax(q @ k.T * scale) @ v`` of what the pattern lets tokens see.

    Sequences and windows need no mask of tokens x tokens: on a GPU they go to
    :func:`torch.nn.attention.varlen.varlen_attn`, on the CPU to ``headroom::attention_segments``,
    and where neither takes them, to torch's attention sequence by sequence. A trace cannot do the
    last, and makes a mask.

    Args:
        q: ``[batch, heads, tokens, head_dim]``.
        k, v: the same, of as many heads or of a divisor of them.
        pattern: which tokens see which.
        dropout: of the probabilities.
        scale: of the scores; by default ``head_dim ** -0.5``.
        run: runs what need not be kept, because it can be computed again.
    """
    if pattern.window is None and pattern.cu_seqlens is None:
        mask, causal = pattern[:2]
        return attend_masked(q, k, v, mask, dropout=dropout, causal=causal, scale=scale, run=run)
    batch, tokens = q.shape[0], q.shape[-2]
    if (dtype := autocast_dtype(q.device.type)) is not None:  # as it casts for torch's attention
        q, k, v = cast(dtype, q, k, v)
    cu_seqlens, longest = pattern.cu_seqlens, pattern.longest
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens
        longest = tokens
    elif longest is None:
        longest = tokens
    window = pattern.window or 0
    flat = tuple(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if dropout == 0 and _varlen_takes(*flat, scale):
        out = _varlen(*flat, cu_seqlens, longest, pattern.causal, window, scale, run)
    elif dropout == 0 and _segments_take(*flat):
        op = torch.ops.headroom.attention_segments
        out = op(*flat, cu_seqlens, pattern.causal, window, scale)[0]
    elif torch.compiler.is_compiling():
        mask = masked(pattern, q.transpose(1, 2)).mask
        return attend_masked(q, k, v, mask, dropout=dropout, causal=False, scale=scale, run=run)
    else:
        out = _by_sequence(*flat, cu_seqlens, pattern.causal, window, dropout, scale, run)
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


# ---- With a mask, or without one where each row is a sequence --------------------------------


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    causal: bool,
    scale: float | None,
    run: Callable[..., Any] = _plain,
) -> Tensor:
    """Returns torch's ``scaled_dot_product_attention`` of grouped heads.

    On the CPU in a dtype that torch has no fast product for, the gradient of FlashAttention is
    computed in float32, where torch's takes 3 to 7 times as long. What is kept, and the result, are
    torch's. On a GPU, where no kernel takes both a mask and fewer keys than queries, keys and
    values are repeated for one that takes the mask.
    """
    if dropout == 0 and _is_slow_flash(q, k, v, mask):
        return _Flash.apply(q, k, v, mask, causal, scale)
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1 and not takes_groups(q, mask):
        k, v = run(functools.partial(repeat_heads, groups, dim=-3), k, v)
    return F.scaled_dot_product_attention(
        *(q, k, v, mask),
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=k.shape[-3] != q.shape[-3],
    )


def takes_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Returns whether torch's attention takes fewer heads of keys than of queries without keeping
    all probabilities. On a GPU FlashAttention does, in 16 bits and without a mask."""
    dtype = autocast_dtype(q.device.type) or q.dtype
    small = dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    return q.device.type != "cuda" or (mask is None and small)


def repeat_heads(groups: int, k: Tensor, v: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Returns keys and values once for each query of a group; their heads are in this dimension."""
    return k.repeat_interleave(groups, dim=dim), v.repeat_interleave(groups, dim=dim)


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


# ---- Sequences and windows -------------------------------------------------------------------


@functools.cache
def _varlen_arguments() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@constant_in_graphs
def _varlen_knows(argument: str) -> bool:
    """Returns whether torch has a ``varlen_attn`` with such an argument."""
    return argument in _varlen_arguments()


def _varlen_takes(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Returns whether ``varlen_attn`` takes heads ``[tokens, heads, head_dim]``: its kernel is
    FlashAttention, or one that takes less."""
    return (
        q.device.type == "cuda"
        and _varlen_knows("window_size")
        and allows_flash(q.device)
        and all(takes_ops(x) and x.dtype == q.dtype for x in (q, k, v))
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and q.numel() > 0
        and (scale is None or scale > 0)
    )


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    window: int,
    scale: float | None,
    run: Callable[..., Any],
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    before = window - 1 if window else -1
    options: dict[str, Any] = {"window_size": (before, 0 if causal else before), "scale": scale}
    groups = q.shape[1] // k.shape[1]
    if _varlen_knows("enable_gqa"):
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        k, v = run(functools.partial(repeat_heads, groups), k, v)
    # One kernel wants the same tensor for both: it then knows that they are equally long.
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def _segments_take(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether ``headroom::attention_segments`` takes heads like those of ``_varlen``."""
    return (
        q.device.type in ("cpu", "meta")
        and allows_flash(q.device)
        and all(takes_ops(x) and x.dtype == q.dtype for x in (q, k, v))
        and q.shape[-1] == v.shape[-1]
        and all(x.stride(-1) == 1 for x in (q, k, v))
    )


def _by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    window: int,
    dropout: float,
    scale: float | None,
    run: Callable[..., Any],
) -> Tensor:
    """Returns the attention of heads ``[tokens, heads, head_dim]``, one length of sequences after
    the other."""
    tokens = q.shape[0]
    ends = ends_of(cu_seqlens, tokens) if type(cu_seqlens) is Tensor else [0, tokens]
    found = []
    for group in groups_of(ends):
        query, key, value = (group.heads(x) for x in (q, k, v))
        parts = [
            attend_masked(
                query[:, :, piece.queries],
                key[:, :, piece.keys],
                value[:, :, piece.keys],
                piece.mask,
                dropout=dropout,
                causal=piece.causal,
                scale=scale,
                run=run,
            )
            for piece in pieces_of(group.length, causal, window, query)
        ]
        found.append(torch.cat(parts, -2).transpose(1, 2).flatten(0, 1))
    return torch.cat(found) if found else q.new_empty(*q.shape[:-1], v.shape[-1])
