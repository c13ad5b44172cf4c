"""Liger: its kernels in a Llama of transformers."""

# /// script
# dependencies = ["liger-kernel==0.8.5", "transformers==5.24.0"]
# ///

import torch
import transformers
from liger_kernel.transformers import apply_liger_kernel_to_llama

apply_liger_kernel_to_llama()
config = transformers.LlamaConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
print("parameters", sum(p.nbytes for p in model.parameters()))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    ids = torch.randint(0, 2048, (2, 512), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
