"""Blocks of every shape, and the gradients that they give at a level."""

from __future__ import annotations

import torch
from headroom.nn import LEVELS, Transformer, TransformerConfig

SHAPE = dict(vocab_size=40, hidden_size=32, layers=1, heads=4, features=48, kv_heads=2)
VECTORS = dict(norm="layer", gated=False, activation="gelu", qkv_bias=True, out_bias=True)
SHAPES = {
    "llama": {},
    "qwen3": dict(qk_norm=True, qkv_bias=True, head_dim=12),
    "gpt2": VECTORS | dict(mlp_bias=True, positions="learned", kv_heads=4),
    "bert": VECTORS | dict(mlp_bias=True, positions="none", layout="post", causal=False),
    "gemma": dict(layout="sandwich", norm_offset=1.0, norm_casting="once", window=3),
    "phi": VECTORS | dict(mlp_bias=True, layout="parallel", rotary_dim=4),
    "dropout": dict(dropout=0.3, attention_dropout=0.2),
    "post_dropout": dict(dropout=0.3, layout="post"),
}
DROPS = [level for level in LEVELS if level != "L0"]


def model_of(name="llama", **options):
    torch.manual_seed(1)
    shape = SHAPE | SHAPES[name] | dict(final_norm=False, head=False) | options
    return Transformer(TransformerConfig(**shape))


def block_and_input(name="llama", dtype=torch.float32, batch=2, tokens=6, **options):
    """A block, and the arguments that a Transformer gives it."""
    model = model_of(name, **options).to(dtype)
    x = torch.randn(batch, tokens, model.config.hidden_size, dtype=dtype, requires_grad=True)
    return model.blocks[0], (
        x,
        *model._inputs(x, model.config.window is not None, tokens, *[None] * 3),
    )


def gradients(block, inputs, save=None, seed=3):
    if save is not None:
        block.save = save
    torch.manual_seed(seed)
    y = block(*inputs)
    (y.float() ** 2).sum().backward()
    return [y.detach(), *taken(block, inputs)]


def taken(block, inputs):
    """The gradients that were made, which are gone then."""
    leaves = [inputs[0], *block.parameters()]
    grads = [p.grad for p in leaves if p.grad is not None]
    for p in leaves:
        p.grad = None
    return grads
