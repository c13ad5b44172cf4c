"""Budgets below what every choice holds: refused before anything is measured, and no others."""

import re

import headroom
import pytest
import torch
from headroom._core.sizes import format_bytes, parse_bytes
from headroom.fitting import DoesNotFit, families
from headroom.fitting.lower_bounds import below_every_choice
from torch import nn

mse_loss = nn.functional.mse_loss
SAMPLES = 12


class Net(nn.Module):
    """Repeated blocks, and a layer that no step uses."""

    def __init__(self, width=48, unused=0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(3)
        )
        self.unused = nn.Linear(width, unused) if unused else nn.Identity()

    def forward(self, x):
        x = x.to(self.blocks[0][0].weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        return x


def net(**options):
    torch.manual_seed(0)
    model = Net(**options)
    return model, (torch.randn(SAMPLES, 48), torch.randn(SAMPLES, 48))


def ladder_of(model, batch, **options):
    return headroom.ladder(model, batch, loss=mse_loss, **options)


def bound(ladder, within):
    """What is said of a budget, by sizes and plans."""
    return below_every_choice(ladder._search.families, within, within)


def trained(model):
    """The bytes of the parameters that get gradients."""
    return sum(p.nbytes for p in model.blocks.parameters() if p.requires_grad)


@pytest.fixture
def unmeasured(monkeypatch):
    def refused(*given):
        raise AssertionError("something was measured")

    monkeypatch.setattr(families, "measure_blocks", refused)
    monkeypatch.setattr(families, "optimizer_seconds", refused)


def refused(model, batch, budget, **options):
    with pytest.raises(DoesNotFit) as raised:
        headroom.fit(model, batch, budget=budget, loss=mse_loss, **options)
    return raised.value


# Beside the weights: of AdamW the state, and gradients where they cannot be released; of SGD these.
CASES = {
    "released": ({}, 3),
    "unused": ({}, 3),
    "clipped": ({"max_grad_norm": 1.0}, 4),
    "sgd": ({"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}, 2),
    "bf16": ({"allow": ("bf16",)}, 3),  # 16 + 16 bits, and two moments of 32
}
SLOW = [
    pytest.param(case, marks=pytest.mark.slow)
    for case in CASES
    if case not in ("released", "unused")
]


@pytest.mark.parametrize("case", ["released", "unused", *SLOW])
def test_what_every_choice_holds_is_refused_and_nothing_that_fits(case):
    """Beside the frontier that measuring finds. A layer that no step uses has no state."""
    options, times = CASES[case]
    model, batch = net(unused=0 if case == "released" else 512)
    ladder = ladder_of(model, batch, **options)
    for point in ladder.points:
        assert bound(ladder, point.peak) is None
    held = trained(model) * times + sum(p.nbytes for p in model.unused.parameters())
    if case == "bf16":
        held -= 2 * sum(p.numel() for p in model.unused.parameters())  # may be cast, with no state
    assert held < ladder.points[0].peak
    assert bound(ladder, held - 1) is not None


def test_the_error_says_what_would_fit(unmeasured, monkeypatch):
    model, batch = net()
    held = 3 * trained(model)
    error = refused(model, batch, held)
    text = str(error)
    assert f"nothing trains the model within {format_bytes(held)}, of which" in text
    assert f"whatever is chosen, a step holds {format_bytes(held)} besides" in text
    budget = parse_bytes(re.search(r"What would fit: a budget of ([\d.]+ [KM]iB)", text)[1])
    monkeypatch.undo()
    fitted = headroom.fit(model, batch, budget=budget, loss=mse_loss, dry_run=True)
    assert fitted.predicted_peak <= budget
    assert error.samples is None and sum(error.by_kind.values()) == error.least
    allow = eval(re.search(r"allow=(\(.*?\))", text)[1])
    assert headroom.fit(model, batch, budget=held, loss=mse_loss, dry_run=True, allow=allow)
    with pytest.raises(DoesNotFit):
        headroom.fit(model, batch, budget=int(0.97 * error.least), loss=mse_loss)


def test_a_loss_that_is_no_mean_is_offered_no_micro_batches(unmeasured):
    def total(output, target):
        return mse_loss(output, target, reduction="sum")

    model, batch = net()
    with pytest.raises(DoesNotFit, match="gradients of parts of a batch do not add up") as raised:
        headroom.fit(model, batch, budget=trained(model), loss=total, allow=("8bit",))
    assert "micro-batches," not in str(raised.value)


def test_a_loss_that_cannot_be_compared_for_lack_of_memory(unmeasured, monkeypatch):
    """Nothing is said of it that is not known."""

    def fails(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(families, "rule_of", fails)
    model, batch = net()
    only = {"release": (False,), "micro_batches": (2, 4)}
    text = str(refused(model, batch, trained(model), only=only))
    assert "too little memory to see whether the gradients of parts of a batch add up" in text
    assert "micro-batches, optimizer headroom" in text and "do not add up" not in text


def test_a_loop_that_names_its_micro_batches(unmeasured):
    """As those of other libraries do: gradients of several batches are not released."""
    model, batch = net()
    held = 4 * trained(model)
    error = refused(model, batch, held, only={"release": (False,), "micro_batches": (2, 4)})
    assert f"a step holds {format_bytes(held)} besides" in str(error)
    assert "4 micro-batches, optimizer headroom" in str(error)
