"""The same training loop before and after: what a user changes; the loss stays the same."""

import headroom
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


def before(net: nn.Sequential, x: torch.Tensor, target: torch.Tensor) -> float:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(50):
        loss = nn.functional.mse_loss(net(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def after(net: nn.Sequential, x: torch.Tensor, target: torch.Tensor) -> float:
    optimizer = headroom.optim.AdamW(net.parameters(), lr=1e-3)  # changed: fused, same arguments
    for _ in range(50):
        total = 0.0
        for part, wanted in zip(x.chunk(4), target.chunk(4)):  # new: a quarter at a time
            for block in net:  # new: recompute each block in backward, save only its input
                part = checkpoint(block, part, use_reentrant=False)
            loss = nn.functional.mse_loss(part, wanted) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return total


if __name__ == "__main__":
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    print(f"before: {before(model(), x, x.sin()):.6f}")
    print(f"after:  {after(model(), x, x.sin()):.6f}")
