"""Layers that no step uses have no gradients and no states, which estimates know."""

import headroom
import pytest
import torch
from torch import nn

mse_loss = nn.functional.mse_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 144), nn.GELU(), nn.Linear(144, 48)) for _ in range(3)
        )
        self.unused = nn.Linear(48, 512)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("make", [torch.optim.AdamW, headroom.optim.AdamW])
def test_a_choice_that_fits_is_found(make):
    x = torch.randn(12, 48)
    used = sum(p.nbytes for p in Net().blocks.parameters())
    model = Net()
    standing = sum(p.nbytes for p in model.parameters()) + 2 * used + 2 * x.nbytes
    budget = standing + used // 2 + 40_000  # with less than the gradients: they must be released
    fitted = headroom.fit(
        model, (x, torch.randn(12, 48)), budget=budget, optimizer=make, loss=mse_loss, dry_run=True
    )
    assert fitted.choice.release and standing < fitted.predicted_peak <= budget
