"""DeepSpeed: an optimizer of 8 bits on the CPU as its client optimizer, under ZeRO-Offload."""

# /// script
# dependencies = ["deepspeed==0.19.8"]
# environment = ["deepspeed"]
# ///

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import deepspeed
import headroom
import torch
from _small import assert_same_losses, batches, network, state_bytes

CONFIG = {
    "train_batch_size": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


def run(make, **options):
    model = network()
    optimizer = make(model.parameters(), lr=1e-3, **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    losses = []
    for x in batches():
        x = x.bfloat16()
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return optimizer, losses


theirs, reference = run(torch.optim.AdamW)
ours, losses = run(headroom.optim.AdamW8bit, min_8bit_size=1024)
assert_same_losses(losses, reference, rtol=0.01)
assert state_bytes(ours) < 0.3 * state_bytes(theirs)
