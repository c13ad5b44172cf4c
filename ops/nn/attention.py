"""Self-attention as a module, and which tokens see which."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._core.rows import autocast_dtype
from ..functional.rope import rope
from .config import check_probabilities, check_sizes, head_sizes
from .flash import attend
from .linear import Linear


class Rotation(NamedTuple):
    """Arguments of :func:`headroom.functional.rope`: tables and, or None, positions."""

    cos: Tensor
    sin: Tensor
    position_ids: Tensor | None = None


class Pattern(NamedTuple):
    """Says which tokens see which, for :func:`torch.nn.functional.scaled_dot_product_attention`."""

    mask: Tensor | None
    causal: bool


def packed_positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the number of the sequence of each token, and its position in it.

    ``cu_seqlens`` is ``[sequences + 1]``: 0, and where each sequence ends. What lies behind the
    last end is one more sequence.

    Raises:
        ValueError: ``cu_seqlens`` on the CPU, where looking waits for no device, does not begin
            with 0 or falls.
    """
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        if type(cu_seqlens) is Tensor and (cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.tolist()[:20]}, wanted 0 and then where each sequence "
                "ends, in rising order; take the cumulative sum of the lengths"
            )
    index = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)
    return sequence, index - cu_seqlens[sequence]


def attention_pattern(
    x: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Pattern:
    """Returns which tokens of ``x``, ``[batch, tokens, hidden]``, see which.

    Args:
        causal: a token sees itself and those before it.
        window: a token sees that many tokens, itself among them, or, if not ``causal``, those less
            than that far away.
        mask: bool, or integer and not 0, where a token is seen; or floating-point, added to the
            scores. ``[batch or 1, tokens]`` says which tokens are seen by all; with 3 or 4
            dimensions it broadcasts to ``[batch, heads, tokens, tokens]``.
        cu_seqlens: int ``[sequences + 1]``: 0, and the end of each of the sequences that are packed
            into one row, which do not see each other.

    All but ``causal`` takes a mask of tokens ** 2 elements of the dtype of ``x``. Blocks can share
    it, where a mask of bools would be converted and kept by each.
    """
    tokens, dtype = x.shape[1], autocast_dtype(x.device.type) or x.dtype
    if window is not None and window >= tokens:
        window = None
    index = torch.arange(tokens, device=x.device)
    distance = index[:, None] - index  # from the token that is seen
    parts = []
    if window is not None:
        parts.append(distance < window)
        if not causal:
            parts.append(distance > -window)
    if cu_seqlens is not None:
        sequence, _ = packed_positions(cu_seqlens.to(x.device), tokens)
        parts.append(sequence[:, None] == sequence)
    if mask is not None:
        if mask.dim() == 2:
            if mask.shape[0] not in (1, x.shape[0]) or mask.shape[1] != tokens:
                raise ValueError(
                    f"mask is {list(mask.shape)}, wanted [batch, tokens], which is "
                    f"{[x.shape[0], tokens]}; a mask of pairs of tokens has 3 or 4 dimensions"
                )
            mask = mask[:, None, None, :]
        if not mask.is_floating_point():
            parts.append(mask.bool())
            mask = None
    if not parts and mask is None:
        return Pattern(None, causal)
    if causal:
        parts.append(distance >= 0)
    added = torch.zeros((), dtype=dtype, device=x.device) if mask is None else mask.to(dtype)
    for seen in parts:
        added = torch.where(seen, added, float("-inf"))
    return Pattern(added, False)


class Attention(nn.Module):
    """Self-attention with a packed projection, through torch's
    :func:`~torch.nn.functional.scaled_dot_product_attention`, whose context managers choose the
    backend.

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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
        mask, causal = pattern
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, mask, dropout=dropout, causal=causal, scale=self.scale)

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
