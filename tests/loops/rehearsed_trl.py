"""TRL's SFT, DPO or GRPO: adapters of PEFT over a model in 4 bits of bitsandbytes."""

# /// script
# dependencies = ["trl==1.16.0", "transformers==5.24.0"]
# ///

import sys

import torch
import transformers
import trl
from _text import PAIRS, PROMPTS, SENTENCES, scores, tokenizer
from datasets import Dataset
from peft import LoraConfig

TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, SENTENCES, {}, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}, {}),
    "grpo": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        PROMPTS,
        {"num_generations": 4, "max_completion_length": 16},
        {"reward_funcs": scores},
    ),
}
trainer_class, config, rows, options, given = TRAINERS[sys.argv[1]]
folder = f"llama-{sys.argv[1]}"
transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    architectures=["LlamaForCausalLM"],
).save_pretrained(folder)
four_bits = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, quantization_config=four_bits, device_map="auto"
)
trainer = trainer_class(
    model,
    args=config(
        "out",
        max_steps=4,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        bf16=True,
        disable_tqdm=True,
        **options,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer(),
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
    **given,
)
trained = [p for p in trainer.model.parameters() if p.requires_grad]
print("parameters", sum(p.nbytes for p in trained))
trainer.train()
