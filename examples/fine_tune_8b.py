"""Fine-tunes a model of the shape of Llama-3-8B on random tokens, to see what memory a way takes.

    python examples/fine_tune_8b.py full torch         # transformers, fused AdamW of torch
    python examples/fine_tune_8b.py full others        # checkpoints, AdamW8bit of bitsandbytes
    python examples/fine_tune_8b.py full headroom      # blocks at L5, AdamW8bit, released gradients
    python examples/fine_tune_8b.py full states        # the same, states on the host
    python examples/fine_tune_8b.py full streamed      # the same, weights and states on the host
    python examples/fine_tune_8b.py qlora others       # PEFT, 4 bits of bitsandbytes, checkpoints
    python examples/fine_tune_8b.py qlora headroom     # adapters over 4 bits, blocks at L5

Steps of one sequence of 2,048 tokens, in bfloat16. Without a GPU they are rehearsed:

    headroom rehearse --gpu "RTX 4090" examples/fine_tune_8b.py qlora headroom
"""

import sys

import headroom
import torch
import transformers

TOKENS, STEPS, RANK = 2048, 3, 16
CONFIG = transformers.LlamaConfig(  # meta-llama/Meta-Llama-3-8B, config.json
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    dtype="bfloat16",
    use_cache=False,
)


def llama(device="cuda"):
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(CONFIG).train()


def full_torch():
    model = llama()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def full_others():
    import bitsandbytes

    model = llama()
    model.gradient_checkpointing_enable()
    return model, bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-5)


def full_headroom(device="cuda", **more):
    model = llama(device)
    headroom.patch(model, save="L5", loss=True, **more)
    model.cuda()
    optimizer = headroom.optim.AdamW8bit(model.parameters(), lr=1e-5)
    headroom.release_gradients(model, optimizer)
    return model, optimizer


def full_states():
    model, optimizer = full_headroom()
    headroom.optim.offload(optimizer)
    return model, optimizer


def full_streamed():
    model, optimizer = full_headroom("cpu", weights="host")
    headroom.optim.offload(optimizer)
    return model, optimizer


def qlora_others():
    import bitsandbytes
    import peft

    model = llama("cpu")
    for block in model.model.layers.modules():
        for name, layer in block.named_children():
            if isinstance(layer, torch.nn.Linear):
                sizes = layer.in_features, layer.out_features
                new = bitsandbytes.nn.Linear4bit(
                    *sizes,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                new.weight = bitsandbytes.nn.Params4bit(
                    layer.weight.data, requires_grad=False, quant_type="nf4"
                )
                setattr(block, name, new)
    model.is_loaded_in_4bit = True
    model.cuda()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, bitsandbytes.optim.AdamW8bit(trained, lr=1e-4)


def qlora_headroom():
    model = llama("meta")
    headroom.quantize(model)
    headroom.lora(model, RANK)
    headroom.patch(model, save="L5", loss=True)
    model.to_empty(device="cuda")
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, headroom.optim.AdamW8bit(trained, lr=1e-4)


WAYS = {
    ("full", "torch"): full_torch,
    ("full", "others"): full_others,
    ("full", "headroom"): full_headroom,
    ("full", "states"): full_states,
    ("full", "streamed"): full_streamed,
    ("qlora", "others"): qlora_others,
    ("qlora", "headroom"): qlora_headroom,
}


def main():
    way = WAYS.get(tuple(sys.argv[1:]))
    if way is None:
        sys.exit(f"usage: fine_tune_8b.py WAY, one of: {', '.join(map(' '.join, WAYS))}")
    model, optimizer = way()
    for _ in range(STEPS):
        ids = torch.randint(CONFIG.vocab_size, (1, TOKENS), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
