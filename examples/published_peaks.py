"""Programs whose peak memory on GPUs others have published, with the settings that they name:
`python examples/published_peaks.py PROGRAM ARGUMENTS`, on a GPU or in a rehearsal."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

STEPS = 3


def steps(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor], clip: float = 0) -> Any:
    """Trains as the programs of transformers do; returns what the last forward pass returned."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return outputs


def tokens(sequences: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (sequences, length), device="cuda")
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def llama(size: str, **options: Any) -> transformers.LlamaConfig:
    """Returns the configuration of Llama 3.1 8B or Llama 3.2 3B."""
    sizes = {
        "8B": (4096, 14336, 32, 32, False),
        "3B": (3072, 8192, 28, 24, True),
    }
    hidden, intermediate, layers, heads, tied = sizes[size]
    return transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        **options,
    )


def qlora(length: str) -> None:
    """4 bits, adapters of rank 32 on all linear layers, one sequence (Unsloth's table)."""
    import bitsandbytes
    import peft

    with tempfile.TemporaryDirectory() as folder:
        llama("8B").save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            device_map="cuda",
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
        )
    model = peft.prepare_model_for_kbit_training(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules="all-linear"))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        steps(model, optimizer, tokens(1, int(length), 128256), clip=1.0)


def metamath(way: str, length: str) -> None:
    """Llama 3.2 3B in bfloat16, 4 sequences, all weights or adapters (PEFT's comparison)."""
    import peft

    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM._from_config(llama("3B", dtype="bfloat16"))
    if way == "lora":
        adapters = peft.LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, adapters)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    held = steps(model, optimizer, tokens(4, int(length), 128256), clip=1.0)
    print("allocated after the step", torch.cuda.memory_allocated(), held.logits.shape)


def bert(*words: str) -> None:
    """bert-large, 4 sequences of 512 tokens (transformers' guide to training on one GPU). As in
    2022, gradients are zeros between steps, not gone."""
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    small = "accumulation" in words
    model = transformers.BertForSequenceClassification(config).cuda()
    if "adafactor" in words:
        optimizer: Any = transformers.Adafactor(
            model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False
        )
    else:  # one tensor after the other, as torch did then
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=1 if small else 4,
            gradient_accumulation_steps=4 if small else 1,
            gradient_checkpointing="checkpoints" in words,
            fp16="fp16" in words,
            max_steps=STEPS,
            report_to=[],
            save_strategy="no",
        )
        ids = torch.randint(100, 30000, (64, 512))
        rows: Any = [{"input_ids": row, "labels": 0} for row in ids]
        trainer = transformers.Trainer(
            model, args, train_dataset=rows, optimizers=(optimizer, None)
        )
        trainer.train()


def logits() -> None:
    """The head and loss of Gemma 2 2B for 8,192 tokens (Cut Cross-Entropy's baseline)."""
    with torch.device("cuda"):
        x = torch.randn(8192, 2304, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(256000, 2304, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(256000, (8192,))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(STEPS):
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scores = (x @ weight.T).float()
        scores = 30 * torch.tanh(scores / 30)
        loss = nn.functional.cross_entropy(scores, labels)
        print("loss", torch.cuda.max_memory_allocated() - before)
        loss.backward()
        del scores, loss
        optimizer.step()


def torchtune(way: str) -> None:
    """Llama 3.1 8B with torchtune's models and loss, compiled, 2 x 2,048 tokens, in bfloat16."""
    import bitsandbytes
    from torchtune import modules, training
    from torchtune.models import llama3_1
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    adapters: dict[str, Any] = {
        "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": 8,
        "lora_alpha": 16,
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        if way == "full":
            model = llama3_1.llama3_1_8b()
        elif way == "lora":
            model = llama3_1.lora_llama3_1_8b(**adapters)
        else:
            model = llama3_1.qlora_llama3_1_8b(**adapters)
    torch.set_default_dtype(before)
    if way != "full":
        set_trainable_params(model, get_adapter_params(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    block = {modules.TransformerSelfAttentionLayer}
    training.set_activation_checkpointing(model, auto_wrap_policy=block)
    kind = torch.optim.AdamW if way != "full" else bitsandbytes.optim.PagedAdamW8bit
    if way == "full":  # its recipe steps in the backward pass
        each = {p: kind([p], lr=2e-5) for p in trained}
        training.register_optim_in_bwd_hooks(model=model, optim_dict=each)
        optimizers: list[Any] = []
    else:
        optimizers = [kind(trained, lr=2e-5)]
    loss_of = training.compile_loss(CEWithChunkedOutputLoss(), verbose=False)
    training.compile_model(model, verbose=False)
    model.set_num_output_chunks(loss_of.num_output_chunks)
    ids = torch.randint(128256, (2, 2048), device="cuda")
    for _ in range(STEPS):
        loss_of(model(ids), ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def torchtitan() -> None:
    """Llama 3.1 8B under FSDP2, 2 x 8,192 tokens of each of 8 ranks, selective checkpoints."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils import checkpoint

    kept = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default}

    def policy(seen: dict[str, int], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        key = f"{ctx.is_recompute} {op}"
        seen[key] = seen.get(key, 0) + (op is torch.ops.aten.mm.default)
        save = op in kept and not (op is torch.ops.aten.mm.default and seen[key] % 2 == 0)
        choices = checkpoint.CheckpointPolicy
        return choices.MUST_SAVE if save else choices.PREFER_RECOMPUTE

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts(partial(policy, {}))

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(llama("8B", use_cache=False))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        block.forward = partial(
            checkpoint.checkpoint, block.forward, use_reentrant=False, context_fn=contexts
        )
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batch = tokens(2, 8192, 128256)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scores = model(input_ids=batch["input_ids"]).logits
        loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), batch["labels"].flatten())
        del scores
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
