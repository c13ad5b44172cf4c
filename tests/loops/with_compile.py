"""torch.compile: a compiled model, patched and with an optimizer."""

# /// script
# dependencies = ["torch==2.15.0", "transformers==5.24.0"]
# ///

import headroom
import torch
from _small import assert_same_losses, llama, sentences


def run(make, patched):
    model = llama()
    if patched:
        headroom.patch(model, save="L2")
    step, optimizer = torch.compile(model), make(model.parameters(), lr=1e-3)
    ids = torch.stack([row["input_ids"] for row in sentences(8)])
    losses = []
    for _ in range(4):
        loss = step(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


assert_same_losses(run(headroom.optim.AdamW, True), run(torch.optim.AdamW, False))
