"""Accelerate: an optimizer that it prepares, and a budget."""

# /// script
# dependencies = ["accelerate==1.15.0"]
# ///

import accelerate
import headroom
import torch
from _small import assert_same_losses, batches, network
from headroom.integrations.accelerate import fit

accelerator = accelerate.Accelerator(cpu=True)


def run(make):
    model = network()
    model, optimizer = accelerator.prepare(model, make(model.parameters(), lr=1e-3))
    losses = []
    for x in batches():
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def within_a_budget():
    pairs = [(x, x) for x in batches()]
    found = fit(
        accelerator,
        network(),
        pairs[0],
        budget="2 MiB",
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda params: headroom.optim.AdamW(params, lr=1e-3),
        tell=lambda text: None,
    )
    model, optimizer = accelerator.prepare(found.model, found.optimizer)
    losses = []
    for pair in pairs:
        losses.append(found.backward(model, pair).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


reference = run(torch.optim.AdamW)
assert_same_losses(run(headroom.optim.AdamW), reference)
assert_same_losses(within_a_budget(), reference)
