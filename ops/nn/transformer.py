"""A transformer from a config: embeddings, blocks, a norm and a head."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.rope import rope_tables
from ..loss.language_model import language_model_loss
from .attention import Attention, Rotation
from .block import Block, norm_names
from .config import TransformerConfig
from .linear import Linear
from .mlp import MLP
from .norms import LayerNorm, RMSNorm
from .pattern import Pattern, attention_pattern, packed_positions
from .steps import levels_for_all
from .trained_copy import called


def _norm(config: TransformerConfig, size: int, options: dict[str, Any]) -> nn.Module:
    if config.norm == "layer":
        return LayerNorm(size, config.norm_eps, **options)
    offset, casting = config.norm_offset, config.norm_casting
    return RMSNorm(size, config.norm_eps, offset=offset, casting=casting, **options)


def _block(config: TransformerConfig, layer: int, options: dict[str, Any]) -> Block:
    hidden, head_dim = config.hidden_size, config.head_dim
    assert head_dim is not None

    def head_norm() -> nn.Module | None:
        return _norm(config, head_dim, options) if config.qk_norm else None

    attention = Attention(
        hidden,
        config.heads,
        kv_heads=config.kv_heads,
        head_dim=head_dim,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        q_norm=head_norm(),
        k_norm=head_norm(),
        causal=config.causal,
        window=config.window if config.has_window(layer) else None,
        scale=config.attention_scale,
        dropout=config.attention_dropout,
        rotary_dim=config.rotary_dim,
        interleaved=config.rope_interleaved,
        **options,
    )
    mlp = MLP(
        hidden,
        config.features,
        activation=config.activation,
        gated=config.gated,
        bias=config.mlp_bias,
        **options,
    )
    norms = {name: _norm(config, hidden, options) for name in norm_names(config.layout)}
    return Block(
        attention, mlp, norms, layout=config.layout, dropout=config.dropout, save=config.save
    )


class Embedding(nn.Module):
    """The embeddings of tokens, with those of learned positions and of token types."""

    def __init__(
        self,
        config: TransformerConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = config.hidden_size
        self.scale, self.dropout = config.embedding_scale, config.embedding_dropout
        self.tokens = nn.Embedding(config.vocab_size, hidden, **options)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_positions, hidden, **options) if learned else None
        types = config.token_types
        self.types = nn.Embedding(types, hidden, **options) if types else None
        self.norm = _norm(config, hidden, options) if config.embedding_norm else None

    def forward(
        self, ids: Tensor, position_ids: Tensor | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        x = self.tokens(ids)
        if self.scale is not None:
            x = x * torch.tensor(self.scale, dtype=x.dtype)  # rounded as transformers rounds it
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if token_types is None else token_types)
        if self.positions is not None:
            if position_ids is None:
                position_ids = torch.arange(ids.shape[-1], device=ids.device)
            x = x + self.positions(position_ids)
        if self.norm is not None:
            x = self.norm(x)
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class Transformer(nn.Module):
    """Embeddings, blocks, a norm and a head, of the shape that ``config`` says.

    Args:
        config: the shape; ``config.save`` is the level of all blocks.
        save: a level for all blocks, or one for each, in the place of ``config.save``; and an
            attribute, which may be assigned to at any time.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        save: str | Sequence[str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embedding = Embedding(config, **options)
        self.blocks = nn.ModuleList(_block(config, k, options) for k in range(config.layers))
        self.norm = _norm(config, config.hidden_size, options) if config.final_norm else None
        self.head = None
        if config.head:
            size = config.hidden_size, config.vocab_size
            self.head = Linear(*size, bias=config.head_bias, **options)
            if config.tied:
                self.head.weight = self.embedding.tokens.weight
        if save is not None:
            self.save = save
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    @property
    def save(self) -> list[str]:
        """Returns the level of each block."""
        return [block.save for block in self.blocks]

    @save.setter
    def save(self, levels: str | Sequence[str]) -> None:
        count = len(self.blocks)
        levels = levels_for_all(levels, count) if isinstance(levels, str) else list(levels)
        if len(levels) != len(self.blocks):
            raise ValueError(
                f"save has {len(levels)} levels, wanted one, or one for each of the "
                f"{len(self.blocks)} blocks"
            )
        for block, level in zip(self.blocks, levels):
            block.save = level

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_types: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        labels: Tensor | None = None,
        loss_options: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Returns logits ``[batch, tokens, vocab_size]``, or hidden states without a head.

        Given labels, returns the loss, for which no logits are made.

        Args:
            ids: int64 ``[batch, tokens]``.
            mask, cu_seqlens: as in :func:`headroom.nn.attention_pattern`.
            position_ids: int64 ``[batch or 1, tokens]`` or ``[tokens]``; by default the tokens are
                counted, in each of the packed sequences from 0. On another device than the CPU,
                and in a traced graph, they must be less than ``config.max_positions`` or than the
                number of tokens: looking at them would wait for the device.
            token_types: int64 like ``ids``; by default 0.
            labels: int64 like ``ids``, with -100 in the places that count for nothing. A causal
                model is to predict each label from the tokens before it, so these are the ids
                themselves; any other predicts the label of its own place.
            loss_options: of :func:`headroom.loss.language_model_loss`, such as
                ``{"label_smoothing": 0.1}``.

        Raises:
            ValueError: labels are given, but the model has no head.
        """
        if labels is not None and self.head is None:
            raise ValueError("Transformer: labels are given, but config.head is False")
        rows = ids.shape[-1]  # of the tables
        if position_ids is not None:
            rows = max(rows, self._rows(position_ids))
        elif cu_seqlens is not None:
            _, position_ids = packed_positions(cu_seqlens.to(ids.device), rows)
        x = self.embedding(ids, position_ids, token_types)
        kinds = {self.config.has_window(k) for k in range(self.config.layers)}
        inputs = {
            kind: self._inputs(x, kind, rows, mask, position_ids, cu_seqlens) for kind in kinds
        }
        for k, block in enumerate(self.blocks):
            rotation, pattern = inputs[self.config.has_window(k)]
            x = block(x, rotation, pattern)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is None or labels is None:
            return x if self.head is None else self.head(x)
        return self._loss(x, labels, cu_seqlens, loss_options or {})

    def _loss(
        self, x: Tensor, labels: Tensor, cu_seqlens: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        assert self.head is not None
        if self.config.causal and cu_seqlens is not None:
            # The last token of a packed sequence is not to predict the first of the next.
            _, positions = packed_positions(cu_seqlens.to(labels.device), labels.shape[-1])
            labels = labels.masked_fill(positions == 0, options.get("ignore_index", -100))
        options = {"shift": self.config.causal} | dict(options)
        return language_model_loss(x, called(self.head), labels, **options)

    def _rows(self, position_ids: Tensor) -> int:
        """Returns how many positions there may be."""
        seen = type(position_ids) is Tensor and position_ids.device.type == "cpu"
        if not seen or torch.compiler.is_compiling() or position_ids.numel() == 0:
            return self.config.max_positions
        if torch._C._are_functorch_transforms_active():
            return self.config.max_positions
        return int(position_ids.max()) + 1

    def _inputs(
        self,
        x: Tensor,
        window: bool,
        rows: int,
        mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Rotation | None, Pattern]:
        """Returns what blocks with or without a window get beside ``x``."""
        config = self.config
        pattern = attention_pattern(
            x,
            causal=config.causal,
            window=config.window if window else None,
            mask=mask,
            cu_seqlens=cu_seqlens,
        )
        if config.positions != "rope":
            return None, pattern
        cos, sin = self._rotation(window, rows, x.device)
        return Rotation(cos, sin, position_ids), pattern

    def _rotation(
        self, window: bool, positions: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        own_base = window and config.window_rope_base is not None
        scaling = None if own_base else config.rope_scaling
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type"))
        compiling = torch.compiler.is_compiling()
        if kind == "dynamic":  # all rows depend on how many there are
            rows, key = positions, (own_base, device, positions)
        elif compiling and positions <= config.max_positions:
            rows, key = config.max_positions, (own_base, device)  # any length, so no new trace
        else:
            rows, key = 1 << max(positions - 1, 0).bit_length(), (own_base, device)
        if key not in self._tables or self._tables[key][0].shape[0] < positions:
            if len(self._tables) > 3:
                self._tables.clear()
            assert config.head_dim is not None
            base = config.window_rope_base if own_base else config.rope_base
            # Training cannot save tables that were made by an evaluation in inference mode.
            with contextlib.nullcontext() if compiling else torch.inference_mode(False):
                self._tables[key] = rope_tables(
                    config.head_dim,
                    rows,
                    base,  # type: ignore[arg-type]
                    scaling,
                    rotary_dim=config.rotary_dim,
                    max_position_embeddings=config.max_positions,
                    device=device,
                )
        cos, sin = self._tables[key]
        return cos[:positions], sin[:positions]
