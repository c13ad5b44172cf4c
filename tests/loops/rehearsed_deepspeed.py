"""DeepSpeed: ZeRO-Offload of the stage that is named."""

# /// script
# dependencies = ["deepspeed==0.19.8"]
# environment = ["deepspeed"]
# ///

import sys

import deepspeed
import torch

CONFIG = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": int(sys.argv[1]), "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
print("parameters", sum(p.nbytes for p in model.parameters()))
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
for _ in range(4):
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    loss = (engine(x) - x).float().square().mean()
    engine.backward(loss)
    engine.step()
