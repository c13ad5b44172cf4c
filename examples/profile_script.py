"""Profiles the steps of a script: where the time and the memory of a step go, by module.

    python examples/profile_script.py runs/profile

The loop is as it was but for the ``with`` line and ``prof.step()``. The folder gets a trace, which
Perfetto (https://ui.perfetto.dev) and TensorBoard show, and the figures as JSON.
"""

import sys

import headroom
import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(
    nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)
)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader([(torch.randn(64), 3) for _ in range(256)], batch_size=32, shuffle=True)
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/profile"

with headroom.profile(folder, model=model, optimizer=optimizer) as prof:
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()

print(prof.table())
print("wrote", *prof.files)
