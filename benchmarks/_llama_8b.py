"""Makes models of Llama 3's shapes without weights, for what `headroom.plan` says of them.

The shape of 8B is that of https://huggingface.co/meta-llama/Meta-Llama-3-8B, config.json.
"""

from __future__ import annotations

from typing import Any

import torch

GIB = 1 << 30


def llama(**sizes: Any) -> torch.nn.Module:
    """Returns a model in bf16 of the shape that all of Llama 3 have, and these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
        **sizes,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def llama_8b() -> torch.nn.Module:
    return llama(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
