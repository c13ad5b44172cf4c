"""Fine-tunes a model of the shape of Llama-3-70B on two GPUs of 24 GB: QLoRA, sharded by FSDP2.

    torchrun --nproc-per-node 2 examples/qlora_70b.py
    python examples/qlora_70b.py --plan    # what each of the parts is for, without a GPU
    headroom rehearse --gpu "RTX 4090" --devices 2 examples/qlora_70b.py

The tokens are random, 512 a step on each GPU, and the weights what its memory holds, since what is
looked at is the memory that this takes; `headroom.load_quantized` reads those of a file. `--small`
trains a small model of that shape in float32 on the CPU, in two processes or in one, which print
the same losses:

    torchrun --nproc-per-node 2 examples/qlora_70b.py --small
    python examples/qlora_70b.py --small
"""

import argparse
import os

import headroom
import torch
import torch.distributed as dist
import transformers
from headroom.planning import FSDP
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

TOKENS, STEPS, RANKS, RANK = 512, 3, 2, 16
LARGE = transformers.LlamaConfig(  # meta-llama/Meta-Llama-3-70B, config.json
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    dtype="bfloat16",
    use_cache=False,
)
SMALL = transformers.LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=896,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    dtype="float32",
    use_cache=False,
)
ON_HOST = 8  # blocks whose shards are, since NCCL takes some of the GPU, too
WHOLE = ("model.embed_tokens.weight", "lm_head.weight")
PARTS = ("4 bits", "blocks at L5", "fused loss", "shards")


def llama(config, device, parts=PARTS):
    """Returns the model with adapters, and with those of PARTS that are named."""
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config).train()
    if "4 bits" in parts:
        headroom.quantize(model)
    headroom.lora(model, RANK)
    if "blocks at L5" in parts:
        headroom.patch(model, save="L5", loss="fused loss" in parts)
    return model


def optimizer_of(parameters):
    return headroom.optim.AdamW8bit([p for p in parameters if p.requires_grad], lr=1e-3)


def train(config, device, rank, ranks):
    """Trains on this rank's part of each batch, and prints the loss of the whole."""
    small = device == "cpu"
    torch.manual_seed(0)
    model = llama(config, "cpu" if small else "meta")
    if ranks > 1:
        for index, block in enumerate(model.model.layers):
            on_host = index < ON_HOST and not small
            fully_shard(block, offload_policy=CPUOffloadPolicy() if on_host else OffloadPolicy())
            if not small:
                block.to_empty(device="cpu" if on_host else device)
        # FSDP2 would gather these for the whole step, and for a moment twice: more than they take.
        whole = {model.get_parameter(name) for name in WHOLE}
        fully_shard(model, ignored_params=whole)
    if not small:
        body = model.model
        for part in (body.embed_tokens, body.norm, body.rotary_emb, model.lm_head):
            part.to_empty(device=device)
    optimizer = optimizer_of(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        ids = torch.randint(config.vocab_size, (RANKS, TOKENS), generator=generator).to(device)
        ids = ids.chunk(ranks)[rank]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if small:
            whole = loss.detach() / ranks
            if ranks > 1:
                dist.all_reduce(whole)
            if rank == 0:
                print(f"step {step}: loss {whole.item():.4f}")
    if not small and rank == 0:
        print(f"reserved by torch: {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")


def plans(config):
    """Prints what a step takes of each GPU with each part more."""
    rows = [PARTS[:count] for count in range(len(PARTS) + 1)]
    ids = torch.randint(config.vocab_size, (1, TOKENS))
    print(f"{'adapters and':<40} a GPU")
    for parts in rows:
        model = llama(config, "meta", parts)
        plan = headroom.plan(
            model,
            optimizer_of,
            {"input_ids": ids, "labels": ids},
            device="cuda",
            world_size=RANKS if "shards" in parts else None,
            shard=FSDP(ignored_params=WHOLE) if "shards" in parts else None,
        )
        print(f"{', '.join(parts) or 'nothing':<40} {plan.total_bytes / 2**30:5.1f} GiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--plan", action="store_true", help="plan only")
    args = parser.parse_args()
    config, device = (SMALL, "cpu") if args.small else (LARGE, "cuda")
    if args.plan:
        return plans(config)
    rank, ranks = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not args.small and ranks != RANKS:
        parser.error(f"it is for {RANKS} GPUs: torchrun --nproc-per-node {RANKS} {__file__}")
    if not args.small:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if ranks > 1:
        dist.init_process_group("gloo" if args.small else "nccl")
    train(config, device, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
