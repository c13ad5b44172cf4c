"""Explains why a run dies of memory: what was asked for, what was live by kind and module, and the
cheapest changes, with their code. Here the loss asks for far more than any machine has.

    python examples/explain_oom.py
    python -m torch.cuda._memory_viz trace_plot oom.pickle -o oom.html     # torch's own viewer
"""

import headroom
import torch
from torch import nn


def block():
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


model = nn.Sequential(nn.Embedding(256, 64), block(), block(), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters())


def loss_of(logits, step):
    if step == 2:
        return torch.empty(2**30, 2**30).mean()
    return logits.float().logsumexp(-1).mean()


def main():
    with headroom.memory.snapshot("oom.pickle", model, optimizer):
        for step in range(4):
            tokens = torch.randint(256, (8, 64))
            loss_of(model(tokens), step).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
