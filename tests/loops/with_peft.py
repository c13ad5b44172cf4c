"""PEFT: an optimizer of its adapters."""

# /// script
# dependencies = ["peft==0.21.2", "transformers==5.24.0"]
# ///

import headroom
import peft
import torch
from _small import assert_same_losses, llama, sentences


def run(optimizer):
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules="all-linear", r=4))
    step = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = {name: torch.stack([row[name] for row in sentences(8)]) for name in sentences(1)[0]}
    losses = []
    for _ in range(6):
        loss = model(**batch).loss
        loss.backward()
        step.step()
        step.zero_grad()
        losses.append(loss.item())
    return losses


assert_same_losses(run(headroom.optim.AdamW), run(torch.optim.AdamW))
