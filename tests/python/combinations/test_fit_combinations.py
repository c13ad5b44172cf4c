"""Batches that ``fit`` parts: the gradients are those of the whole batch in float64, or the batch
is not parted."""

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.fitting import DoesNotFit
from torch import nn

from helpers.combined import combinations, distance, gradients, in_float64

ROWS, SIZE = 16, 6


class Rare(nn.Module):
    """Draws random numbers, as dropout does, and drops nothing, so that there is a right result."""

    def forward(self, x):
        return F.dropout(x, 1e-12, self.training)


class Standardized(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0, correction=0) + 0.1)


LAYERS = {"none": nn.Identity, "rare": Rare, "batch": Standardized, "frozen": nn.Identity}


class Model(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(SIZE, 9), nn.Linear(9, 1)
        self.first, self.second = LAYERS[first](), LAYERS[second]()
        self.down.requires_grad_("frozen" not in (first, second))

    def forward(self, x):
        return self.down(self.second(self.first(torch.tanh(self.up(x)))))[:, 0]


def policy(output, target):
    """0 for any batch, with a gradient: advantages are normalized over the batch."""
    advantage = (target - target.mean()) / target.std(correction=0)
    return -((output - output.detach()).exp() * advantage).mean()


LOSSES = {
    "mean": F.mse_loss,
    "sum": lambda output, target: F.mse_loss(output, target, reduction="sum"),
    "policy": policy,
    "tiny sum": lambda output, target: 1e-10 * F.mse_loss(output, target, reduction="sum"),
    "tiny mean": lambda output, target: 1e-10 * F.mse_loss(output, target),
    "difference": lambda output, target: (output - output.detach()).mean() * target.square().mean(),
    "root": lambda output, target: F.mse_loss(output, target).sqrt(),
    "centered": lambda output, target: (output - output.mean() - target).square().mean(),
}


@combinations(
    {
        "loss": [*LOSSES],
        "first": ["none", "rare"],
        "second": ["none", "batch", "frozen"],
        "dtype": [torch.float32, torch.float64],
        "parts": [2, 4, 8],
        "loop": ["step", "backward"],
    },
    full=100,
)
def test_the_gradients_of_parts_are_those_of_the_batch(case):
    model = Model(case["first"], case["second"]).to(case["dtype"])
    loss = LOSSES[case["loss"]]
    batch = torch.randn(ROWS, SIZE).to(case["dtype"]), torch.randn(ROWS).to(case["dtype"])
    right = in_float64(model)
    loss(right(batch[0].double()), batch[1].double()).backward()
    wanted = gradients(right)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    try:
        fitted = headroom.fit(
            model,
            batch,
            budget="1 GiB",
            optimizer=optimizer,
            loss=loss,
            only={"micro_batches": (case["parts"],), "release": (False,)},
        )
    except (DoesNotFit, ValueError):
        assert case["loss"] != "mean" or case["second"] == "batch"  # it is the sum of its parts
        pytest.skip("the batch is not parted")
    assert fitted.choice.micro_batches == case["parts"]
    if case["loop"] == "step":
        fitted.step(batch)
    else:
        parts = fitted.micro_batches(batch)
        for part, share in zip(parts, fitted.shares(parts)):
            (share * loss(fitted.model(part[0]), part[1])).backward()
        fitted.optimizer.step()
    after = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    # An update below an ulp of the weights is not seen in them, so that of the gradients is taken.
    error = (after - (before - wanted)).norm()
    ulps = torch.finfo(case["dtype"]).eps * before.norm()
    assert error <= 1e-5 * wanted.norm() + 4 * ulps
    if all(p.grad is not None for p in model.parameters() if p.requires_grad):
        assert distance(gradients(model), wanted) < 1e-4
