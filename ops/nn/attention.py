"""Self-attention as a module."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.rope import rope
from .config import check_probabilities, check_sizes, head_sizes
from .flash import attend
from .linear import Linear
from .pattern import Pattern, attention_pattern


class Rotation(NamedTuple):
    """Arguments of :func:`headroom.functional.rope`: tables and, or None, positions."""

    cos: Tensor
    sin: Tensor
    position_ids: Tensor | None = None


class Attention(nn.Module):
    """Self-attention with a packed projection, through torch's
    :func:`~torch.nn.functional.scaled_dot_product_attention`, whose context managers choose the
    backend, or for packed sequences and windows through kernels that need no mask.

    Args:
        hidden_size: the size of the last dimension of inputs and results.
        heads: how many heads the queries have.
        kv_heads: how many heads keys and values have: a divisor of ``heads``; by default ``heads``.
        head_dim: by default ``hidden_size // heads``.
        qkv_bias, out_bias: whether the Linears ``qkv`` and ``out`` have biases. The rows of ``qkv``
            are queries, keys and values.
        q_norm, k_norm: modules that take heads in front of the rotation, or None.
        causal, window: as in :func:`attention_pattern`.
        scale: of the scores; by default ``head_dim ** -0.5``.
        dropout: of the probabilities. On the CPU torch then keeps all of them for backward.
        rotary_dim, interleaved: as in :func:`headroom.functional.rope`.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("Attention", window=window)
        check_probabilities("Attention", dropout=dropout)
        self.heads = heads
        self.kv_heads, self.head_dim = head_sizes(
            "Attention", hidden_size, heads, kv_heads, head_dim
        )
        self.causal, self.window, self.scale = causal, window, scale
        self.dropout = dropout
        self.rotary_dim, self.interleaved = rotary_dim, interleaved
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = (heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(hidden_size, rows, bias=qkv_bias, **options)
        self.out = Linear(heads * self.head_dim, hidden_size, bias=out_bias, **options)
        self.q_norm, self.k_norm = q_norm, k_norm

    def pattern(
        self, x: Tensor, mask: Tensor | Pattern | None, cu_seqlens: Tensor | None
    ) -> Pattern:
        if isinstance(mask, Pattern):
            return mask
        return attention_pattern(
            x, causal=self.causal, window=self.window, mask=mask, cu_seqlens=cu_seqlens
        )

    # The steps of forward(), between which a Block decides what is kept.

    def split(
        self,
        packed: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, ``[batch, heads, tokens, head_dim]``, given the result of ``qkv``."""
        heads = packed.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if cos is not None and sin is not None:
            q, k = rope(
                q,
                k,
                cos,
                sin,
                interleaved=self.interleaved,
                position_ids=position_ids,
                rotary_dim=self.rotary_dim,
                token_major=True,
            )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **options: Any) -> Tensor:
        """Returns the result of attention, ``[batch, heads, tokens, head_dim]``. The options are
        those of :func:`headroom.nn.flash.attend`."""
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, pattern, dropout=dropout, scale=self.scale, **options)

    @staticmethod
    def merge(heads: Tensor) -> Tensor:
        """Returns ``[batch, tokens, heads * head_dim]``, mostly in the memory of ``heads``."""
        return heads.transpose(1, 2).flatten(-2)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mask: Tensor | Pattern | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Returns ``out(attention)``.

        Args:
            x: ``[batch, tokens, hidden_size]``.
            rotation: tables of :func:`headroom.functional.rope_tables`, and positions.
            mask, cu_seqlens: as in :func:`attention_pattern`.
        """
        pattern = self.pattern(x, mask, cu_seqlens)
        q, k, v = self.split(self.qkv(x), *(rotation or ()))
        return self.out(self.merge(self.attend(q, k, v, pattern)))

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, window={self.window}, dropout={self.dropout}"
        )
