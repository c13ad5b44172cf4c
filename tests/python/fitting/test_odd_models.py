"""Models whose blocks are called in turn, write to what others saved, or keep tensors of graphs."""

import headroom
import pytest
import torch
from torch import nn

mse_loss = nn.functional.mse_loss


class InTurn(nn.Module):
    """Calls every other block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for number, block in enumerate(self.blocks):
            if (number + self.calls) % 2:
                x = torch.tanh(block(x))
        return x


class Writes(nn.Module):
    """Writes to the argument of a block after the block has run, which has not saved it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(48, 48)) for _ in range(4))

    def forward(self, x):
        x = x * 1.0
        for block in self.blocks:
            x += block(x)
        return x


class Keeps(nn.Linear):
    """Keeps a loss of its own, which has a graph."""

    def forward(self, x):
        self.loss = x.square().mean()
        return torch.tanh(super().forward(x))


def keeping():
    model = nn.Sequential(*(Keeps(48, 48) for _ in range(4)))
    model(torch.randn(3, 48, requires_grad=True))
    return model


def step_of(model, optimizer, x, target):
    loss = mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("make", [InTurn, Writes, keeping])
def test_training_goes_on_as_without(make):
    torch.manual_seed(0)
    batch = torch.randn(100, 48), torch.randn(100, 48)
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(make())
    plain, model = models
    budget = headroom.plan(plain, torch.optim.AdamW, batch, loss=mse_loss).peak_bytes + 50_000
    fitted = headroom.fit(model, batch, budget=budget, loss=mse_loss)
    optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(3):
        want = step_of(plain, optimizer, *batch)
        assert fitted.step(batch) == pytest.approx(float(want), rel=1e-5)
    assert fitted.measured_peak <= budget
    if make is Writes:
        assert fitted.choice.levels == () and "levels: blocks cannot be run again" in str(fitted)


def test_the_error_is_the_models_own():
    class Wrong(nn.Sequential):
        def forward(self, x):
            raise RuntimeError("of the model")

    model = Wrong(nn.Linear(48, 48), nn.Linear(48, 48))
    with pytest.raises(RuntimeError, match="of the model"):
        headroom.fit(model, torch.randn(3, 48), budget="1 GiB", forward=lambda m, x: m(x).sum())


def test_parts_that_cannot_run_are_not_timed():
    """A mask of as many rows as there are samples is cut with them."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(48, 4, 96, 0.0, batch_first=True) for _ in range(2)
            )

        def forward(self, x, mask):
            for block in self.blocks:
                x = block(x, src_mask=mask)
            return x

    batch = torch.randn(8, 8, 48), torch.zeros(8, 8), torch.randn(8, 8, 48)
    ladder = headroom.ladder(Masked(), batch, loss=mse_loss)
    for point in ladder.points:
        fitted = headroom.fit(
            Masked(), batch, budget=point.peak + 60_000, loss=mse_loss, dry_run=True
        )
        assert fitted.choice.micro_batches == 1


def test_a_ladder_without_blocks_starts_where_something_fits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 99), nn.ReLU(), nn.BatchNorm1d(99), nn.Linear(99, 3))
    batch = torch.randn(300, 48), torch.randn(300, 3)
    least = headroom.ladder(model, batch, loss=mse_loss).points[0]
    fitted = headroom.fit(model, batch, budget=least.peak + 40_000, loss=mse_loss, dry_run=True)
    assert fitted.predicted_peak <= least.peak + 40_000
