"""Fine-tunes mixtures of experts by adapters over experts in 4 bits, on random tokens, to see what
memory that takes.

    python examples/fine_tune_mixture.py qwen3-30b            # experts in NF4, adapters of rank 2
    python examples/fine_tune_mixture.py qwen3-30b --host     # the same, weights on the host
    python examples/fine_tune_mixture.py gpt-oss-20b          # in MXFP4, as its files are; rank 4
    python examples/fine_tune_mixture.py mixtral-8x7b --host  # NF4, rank 8

Steps of one sequence of 4,096 tokens in bfloat16. Without a GPU they are rehearsed:

    headroom rehearse --gpu "RTX 4090" examples/fine_tune_mixture.py qwen3-30b
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import headroom
import torch
import transformers

STEPS, RANK = 3, 16  # the rank of linear layers; each expert of a token has its share of it
COMMON: dict[str, Any] = dict(dtype="bfloat16", use_cache=False)
CONFIGS = {
    "qwen3-30b": transformers.Qwen3MoeConfig(  # Qwen/Qwen3-30B-A3B, config.json
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
        **COMMON,
    ),
    "gpt-oss-20b": transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32, **COMMON),
    "mixtral-8x7b": transformers.MixtralConfig(**COMMON),
}


def empty_model(name):
    """Returns a model without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).train()


def write_files(model, folder):
    """Writes files of zeros, which take no room on the disk, as gpt-oss is published: a matrix of
    experts as blocks of 32 weights in 16 bytes, with a scale each."""
    header, end = {}, 0

    def add(key, dtype, shape, size):
        nonlocal end
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size

    for key, p in model.state_dict().items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = p.shape
            blocks = [experts, outputs, inputs // 32]
            add(f"{key}_blocks", "U8", [*blocks, 16], p.numel() // 2)
            add(f"{key}_scales", "U8", blocks, p.numel() // 32)
        else:
            add(key, "BF16", [*p.shape], 2 * p.numel())
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def made(name, device):
    """Returns a model whose frozen weights are in 4 bits, with adapters, experts' too."""
    model = empty_model(name)
    if name == "gpt-oss-20b":
        with tempfile.TemporaryDirectory() as folder:
            write_files(model, Path(folder))
            headroom.load_quantized(model, folder, device=device)
        headroom.quantize(model)  # what is not in MXFP4
        torch.cuda.empty_cache()  # of what that was
        headroom.lora(model, RANK, experts=True)
    else:
        headroom.quantize(model)
        headroom.lora(model, RANK, experts=True)
        model.to_empty(device=device)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("--host", action="store_true", help="weights of blocks stay on the host")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    model = made(args.name, "cpu" if args.host else "cuda")
    headroom.patch(model, save="L5", loss=True, weights="host" if args.host else None)
    model.cuda()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = headroom.optim.AdamW8bit(trained, lr=1e-4)
    for _ in range(STEPS):
        ids = torch.randint(model.config.vocab_size, (1, args.tokens), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
