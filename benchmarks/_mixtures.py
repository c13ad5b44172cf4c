"""Peaks of fine-tuning mixtures of experts on one GPU, as planned: the table of docs/experts.md.

    python -m benchmarks._mixtures [NAME]

Models have the real sizes and no memory. Nothing is computed, and no GPU is asked.
"""

from __future__ import annotations

import sys
from typing import Any

import headroom
import torch
import transformers
from headroom.functional import mxfp4_matrix
from headroom.nn import QuantizedExperts
from headroom.patching.experts import found_experts
from torch import nn

QWEN3_30B: dict[str, Any] = dict(
    vocab_size=151936,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
)
GPT_OSS_20B: dict[str, Any] = dict(num_hidden_layers=24, num_local_experts=32)
MIXTRAL: dict[str, Any] = dict(num_key_value_heads=8)  # the rest is the default
# The class, its sizes, the format of experts, the rank of their adapters, and tokens of a step.
CASES = {
    "Qwen3-30B-A3B": ("Qwen3Moe", QWEN3_30B, "nf4", 2, (2048, 4096)),
    "gpt-oss-20b": ("GptOss", GPT_OSS_20B, "mxfp4", 4, (2048, 4096)),
    "Mixtral-8x7B": ("Mixtral", MIXTRAL, "nf4", 8, (2048, 4096)),
}


def in_mxfp4(model: nn.Module) -> None:
    """Experts of gpt-oss as its files have them, without values."""
    for module, rule in found_experts(model).items():
        assert not isinstance(rule, str)
        stacks = []
        for name in rule.stacks:
            count, inputs, outputs = getattr(module, name).shape
            blocks = torch.empty(count, outputs, inputs // 32, 16, dtype=torch.uint8, device="meta")
            stacks.append(mxfp4_matrix(blocks, blocks[..., 0]))
        QuantizedExperts.take(module, rule, stacks)


def made(family: str, sizes: dict[str, Any], kind: str, rank: int) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    if kind == "mxfp4":
        in_mxfp4(model)
    headroom.quantize(model)
    headroom.lora(model, 16, experts=rank)
    headroom.patch(model, "L5", loss=True)
    return model


def main() -> None:
    for name in sys.argv[1:] or CASES:
        *how, lengths = CASES[name]
        model = made(*how)
        trained = [param for param in model.parameters() if param.requires_grad]
        count, fixed = sum(param.numel() for param in trained), 0
        for tokens in lengths:
            ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
            optimizer = headroom.optim.AdamW8bit(trained)
            batch = {"input_ids": ids, "labels": ids}
            plan = headroom.plan(model, optimizer, batch, device="cuda")
            fixed = sum(param.nbytes for param in model.parameters()) / 2**30
            print(
                f"{name} in {how[2]}, {count / 1e6:.0f} M trained, {tokens:,} tokens: "
                f"{plan.total_bytes / 2**30:.1f} GiB, of which parameters {fixed:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
