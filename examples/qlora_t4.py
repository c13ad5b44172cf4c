"""Fine-tunes a 7B on a T4 of 15 GB beside a host of 12 GB, as Colab lends them: QLoRA in float16.

    python examples/qlora_t4.py FOLDER TEXT    # a model of transformers, and a file of text
    headroom rehearse --gpu T4 --host-memory "12 GiB" examples/qlora_t4.py

The weights of FOLDER are quantized one after the other as they are read, so that the host never
holds the model. A T4 has no bfloat16: what is not quantized is in float16, the adapters in float32,
and the loss is scaled. They are saved in PEFT's format.

Without FOLDER and TEXT it trains the shape of Mistral-7B on random tokens, with the weights that
memory holds, to see what that takes.
"""

import argparse
from pathlib import Path

import headroom
import torch
import transformers

RANK = 16
SHAPE = transformers.MistralConfig(  # mistralai/Mistral-7B-v0.3, config.json
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    sliding_window=None,
)


def model_of(folder, device):
    """Returns the model in 4 bits, with adapters and patched."""
    config = transformers.AutoConfig.from_pretrained(folder) if folder else SHAPE
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).train()
    if folder:
        headroom.load_quantized(model, folder, device=device)
        model.to(torch.float16)
    else:
        headroom.quantize(model)
    headroom.lora(model, RANK)
    headroom.patch(model, save="L5", loss=True)
    return model if folder else model.to_empty(device=device)


def rows_of(folder, text, tokens):
    """Returns the text's tokens, in rows of so many."""
    if folder is None:
        return torch.randint(SHAPE.vocab_size, (8, tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[0]
    if len(ids) < tokens:
        raise SystemExit(f"{text} has {len(ids)} tokens, wanted {tokens} at least: give --tokens")
    return ids.unfold(0, tokens, tokens)


def train(model, rows, steps, device):
    """Trains the adapters on a row in each step, and returns the losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = headroom.optim.AdamW8bit(trained, lr=2e-4)
    scaler = headroom.amp.GradScaler(device)
    losses = []
    for step in range(steps):
        ids = rows[step % len(rows)][None].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="config, tokenizer, safetensors")
    parser.add_argument("text", nargs="?", type=Path, help="what is trained on")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("adapters"), help="folder of the adapters")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(args)
    if (args.folder is None) != (args.text is None):
        parser.error("give both FOLDER and TEXT, or none")
    rows = rows_of(args.folder, args.text, args.tokens)
    model = model_of(args.folder, args.device)
    losses = train(model, rows, args.steps, args.device)
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    headroom.state.save_adapter(model, args.out)


if __name__ == "__main__":
    main()
