"""Swaps torch's AdamW for Headroom's: one line changes, and a checkpoint of the one resumes in the
other."""

import headroom
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
x = torch.randn(32, 64)


def train(optimizer: torch.optim.Optimizer, steps: int) -> float:
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


before = torch.optim.AdamW(model.parameters(), lr=1e-3)
print(f"torch:    {train(before, 50):.4f}")
after = headroom.optim.AdamW(model.parameters(), lr=1e-3)  # the line that changes
after.load_state_dict(before.state_dict())
print(f"headroom: {train(after, 50):.4f}")
