"""Describes what a transformer looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._core.checks import check_choice


def check_sizes(owner: str, **sizes: int | None) -> None:
    """Raises a ValueError where one is less than 1; None is a default."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{owner}: {name} is {size}, wanted at least 1")


def check_probabilities(owner: str, **probabilities: float) -> None:
    """Raises a ValueError where one is not in [0, 1]."""
    for name, p in probabilities.items():
        if not 0 <= p <= 1:
            raise ValueError(f"{owner}: {name} is {p}, wanted a probability from 0 to 1")


def head_sizes(
    owner: str, hidden_size: int, heads: int, kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Returns how many heads keys and values have, and the size of a head; None is a default.

    Raises:
        ValueError: they do not fit.
    """
    check_sizes(owner, hidden_size=hidden_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"{owner}: kv_heads is {kv_heads}, wanted a divisor of heads ({heads})")
    if head_dim is None and hidden_size % heads:
        raise ValueError(
            f"{owner}: hidden_size is {hidden_size}, wanted a multiple of heads ({heads}), or "
            "head_dim"
        )
    return kv_heads or heads, head_dim or hidden_size // heads


@dataclass
class TransformerConfig:
    """The shape of a :class:`~headroom.nn.Transformer`: those of Llama, Qwen2 and 3, Mistral,
    Gemma, Phi, GPT-2 and BERT among others.

    :func:`headroom.nn.config_from_hf` makes it from a configuration of transformers.

    Attributes:
        vocab_size, hidden_size, layers, heads, features: of the model, per token and per head.
        kv_heads, head_dim: by default ``heads`` and ``hidden_size // heads``.
        layout: of the blocks, as in :class:`~headroom.nn.Block`.
        norm: "rms" or "layer".
        norm_eps, norm_offset, norm_casting: of the norms, as in
            :func:`headroom.functional.rms_norm`; the last two only with "rms".
        activation, gated: of the MLPs, as in :class:`~headroom.nn.MLP`.
        qkv_bias, out_bias, mlp_bias, head_bias: which Linears have biases.
        qk_norm: whether queries and keys are normalized per head.
        causal: whether a token sees only those before it.
        window: how many tokens a token sees; None: all.
        window_layers: per layer whether the window holds; None: in all.
        attention_scale: by default ``head_dim ** -0.5``.
        positions: "rope", "learned" or "none".
        max_positions: rows of the learned positions; with "rope", what the model was trained with,
            which only some kinds of ``rope_scaling`` read.
        rope_base, rope_scaling, rotary_dim, rope_interleaved: as in
            :func:`headroom.functional.rope_tables` and :func:`headroom.functional.rope`.
        window_rope_base: base in layers with a window, which then have no ``rope_scaling``; None:
            they are like the others.
        token_types: how many kinds of tokens have embeddings, as in BERT; 0: none.
        embedding_norm: whether embeddings are normalized.
        embedding_scale: factor of the embeddings; None: 1.
        final_norm: whether there is a norm behind the last block.
        head: whether the result is logits, and not hidden states.
        tied: whether the head's weight is that of the embeddings.
        dropout, attention_dropout, embedding_dropout: probabilities.
        save: the level of the blocks, as in :class:`~headroom.nn.Block`.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    features: int
    kv_heads: int | None = None
    head_dim: int | None = None
    layout: str = "pre"
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_casting: str = "llama"
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    causal: bool = True
    window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    attention_scale: float | None = None
    positions: str = "rope"
    max_positions: int = 2048
    rope_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    window_rope_base: float | None = None
    token_types: int = 0
    embedding_norm: bool = False
    embedding_scale: float | None = None
    final_norm: bool = True
    head: bool = True
    tied: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    save: str = "L0"

    def __post_init__(self) -> None:
        check_sizes(
            "TransformerConfig",
            vocab_size=self.vocab_size,
            features=self.features,
            window=self.window,
            max_positions=self.max_positions,
        )
        if self.layers < 0 or self.token_types < 0:
            raise ValueError(
                f"TransformerConfig: layers is {self.layers} and token_types is "
                f"{self.token_types}, wanted at least 0"
            )
        check_probabilities(
            "TransformerConfig",
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            embedding_dropout=self.embedding_dropout,
        )
        owner = "TransformerConfig: "
        check_choice("norm", self.norm, ("rms", "layer"), owner)
        check_choice("positions", self.positions, ("rope", "learned", "none"), owner)
        self.kv_heads, self.head_dim = head_sizes(
            "TransformerConfig", self.hidden_size, self.heads, self.kv_heads, self.head_dim
        )
        if self.window_layers is not None and len(self.window_layers) != self.layers:
            raise ValueError(
                f"TransformerConfig: window_layers has {len(self.window_layers)} entries, wanted "
                f"one for each of the {self.layers} layers"
            )

    def has_window(self, layer: int) -> bool:
        """Returns whether the window holds in a layer."""
        if self.window is None:
            return False
        return self.window_layers is None or self.window_layers[layer]
