"""torchtune: a Llama 3 with its adapters and its chunked loss, in a loop."""

# /// script
# dependencies = ["torchtune==0.6.1", "torchao==0.10.0"]
# environment = ["torchtune"]
# ///

import torch
from torchtune.models.llama3 import lora_llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

model = lora_llama3(
    lora_attn_modules=["q_proj", "v_proj"],
    apply_lora_to_mlp=True,
    vocab_size=2048,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=512,
    max_seq_len=1024,
    intermediate_dim=1024,
    lora_rank=8,
    lora_alpha=16,
).to("cuda", torch.bfloat16)
set_trainable_params(model, get_adapter_params(model))
loss_of = CEWithChunkedOutputLoss()
model.set_num_output_chunks(loss_of.num_output_chunks)
trained = [p for p in model.parameters() if p.requires_grad]
print("parameters", sum(p.nbytes for p in trained))
optimizer = torch.optim.AdamW(trained)
for _ in range(4):
    ids = torch.randint(0, 2048, (2, 512), device="cuda")
    loss_of(model(ids), ids).backward()
    optimizer.step()
    optimizer.zero_grad()
