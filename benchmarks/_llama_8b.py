"""Prints what a full fine-tune of Llama-3-8B in bf16 takes on a GPU of 24 GiB, as `headroom.plan`
computes it: `python -m benchmarks._llama_8b`. Needs no GPU and no weights; takes a minute.

The shape is that of https://huggingface.co/meta-llama/Meta-Llama-3-8B, config.json. Seconds are
bytes over rates, each way: 25 GB/s for PCIe 4.0 x16 and 50 for 5.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

GIB = 1 << 30
TOKENS = 4096


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


def main() -> None:
    import headroom

    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    print("| states | blocks | GPU | host | copied in a step, each way | at 25 GB/s | at 50 GB/s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for offload in (None, "state"):
        for save in ("L2", "L5", "L2@host"):
            model = llama_8b()
            headroom.patch(model, save=save, loss=True)
            make = partial(headroom.optim.AdamW8bit, master="remainder16", offload=offload)
            plan = headroom.plan(
                model, make, {"input_ids": ids, "labels": ids}, device="cuda", release=True
            )
            way = plan.link_bytes / 2
            print(
                f"| {'on the host' if offload else 'on the GPU'} | {save} "
                f"| {plan.total_bytes / GIB:.1f} GiB | {plan.host_peak_bytes / GIB:.1f} GiB "
                f"| {way / 1e9:.1f} GB | {way / 25e9:.2f} s | {way / 50e9:.2f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
