"""Loops with Muon, of torch or ours, for ``headroom.fit`` and ``headroom.ladder``."""

import copy
import warnings
from functools import partial

import headroom
import pytest
import torch
from headroom.fitting import DoesNotFit
from headroom.fitting.costs.optimizer_seconds import optimizer_seconds
from headroom.fitting.search.techniques import techniques_of
from headroom.optim import Muon, Muon8bit
from headroom.step.description import Step
from headroom.step.optimizers import optimizer_of
from torch import nn

WIDTH = 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(61, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 61, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def made(rows=7):  # a prime number
    torch.manual_seed(0)
    tokens = torch.randint(0, 61, (rows, 18))
    return Model(), (tokens[:, :-1], tokens[:, 1:].contiguous())


def ours(model):
    options = {"adamw": {"lr": 3e-3}, "workspace": "100 KiB", "split": {"up": 3}, "momentum": 0.9}
    return Muon(model, lr=0.02, adjust_lr_fn="match_rms_adamw", **options)


def theirs(model):
    """All that is trained, as a loop with another optimizer beside it has it not."""
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    for module in (model.wte, model.head):
        module.requires_grad_(False)
    hidden = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    return torch.optim.Muon(hidden, lr=0.02)


def peak_of(fitted, batch, steps=3):
    with headroom.memory.track(fitted.model, fitted.optimizer, batch=batch) as tracked:
        losses = [float(fitted.step(batch)) for _ in range(steps)]
    return tracked.peak_bytes, losses


@pytest.mark.parametrize(
    "make, names", [(ours, {"given", "8bit"}), (theirs, {"given", "headroom", "8bit"})]
)
def test_what_can_take_its_place(make, names):
    model, batch = made()
    step = Step(model, make(model), batch, loss, device=torch.device("cpu"))
    found = techniques_of(step, ("8bit", "bf16", "adafactor"))
    assert {kind for kind, weights in found.optimizers if weights == "given"} == names
    assert {kind for kind, weights in found.optimizers if weights == "bf16"} == {"headroom", "8bit"}
    assert type(found.optimizers["8bit", "bf16"]) is Muon8bit
    assert found.optimizers["8bit", "bf16"].param_groups[0]["master"] == "remainder16"


@pytest.mark.slow
@pytest.mark.parametrize("make", [ours, theirs])
def test_a_budget_with_8_bit_momentum(make):
    """Alone: whether levels that compute again are quicker is a matter of time."""
    model, batch = made()
    only = {"micro_batches": (1,), "release": (False,)}
    options = {"loss": loss, "only": only, "margin": 0.0}
    with pytest.raises(DoesNotFit):
        headroom.fit(model, batch, budget="100 KiB", optimizer=make(model), **options)
    twin = copy.deepcopy(model)
    own = headroom.fit(twin, batch, budget="1 GiB", optimizer=make(twin), **options)
    least, losses = peak_of(own, batch)
    given = make(model)
    options |= {"allow": ("8bit",), "only": only | {"optimizer": ("8bit",)}}
    fitted = headroom.fit(model, batch, budget=int(0.87 * least), optimizer=given, **options)
    assert type(fitted.optimizer) is Muon8bit and fitted.choice.optimizer == "8bit"
    groups = zip(fitted.optimizer.param_groups, given.param_groups, strict=True)
    assert all(one["params"] == other["params"] for one, other in groups)
    assert fitted.optimizer.param_groups[0]["lr"] == 0.02
    most, ours_then = peak_of(fitted, batch)
    assert fitted.predicted_peak == pytest.approx(most, rel=0.01)
    assert most <= 0.87 * least and ours_then[2] < ours_then[0]
    torch.testing.assert_close(torch.tensor(ours_then), torch.tensor(losses), rtol=0.05, atol=0)
    fitted.undo()


def test_a_ladder_with_muon():
    """By class: its steps get leaner, and fit() takes its choice."""
    model, batch = made()
    make = partial(Muon, lr=0.02)
    found = headroom.ladder(model, batch, optimizer=make, loss=loss, allow=("8bit", "bf16"))
    peaks = [rung.peak for rung in found.points]
    assert peaks == sorted(peaks) and len(peaks) > 2
    budget = int(1.2 * peaks[0]) + (1 << 16)
    again = headroom.fit(
        model, batch, budget=budget, optimizer=make, loss=loss, allow=("8bit", "bf16"), ladder=found
    )
    assert isinstance(again.optimizer, Muon | Muon8bit)
    most, losses = peak_of(again, batch)
    assert most <= budget and losses[2] < losses[0]


@pytest.mark.parametrize("cls", [Muon, Muon8bit])
def test_seconds_of_matrices_grow_with_their_operations(cls, monkeypatch):
    """4 times as long for twice the side is what bytes say; products take 8 times as long."""
    from headroom.fitting.costs import optimizer_seconds as module

    monkeypatch.setattr(module.statistics, "median", lambda seconds: 1.0)
    times = []
    for side in (1024, 2048):
        model = nn.ModuleDict({"one": nn.Linear(side, side, bias=False)})
        times.append(optimizer_seconds(optimizer_of(cls, model), torch.device("cpu"), repeats=1))
    # Of each 2**18 elements are timed: 256 rows of 1024, and 128 of 2048.
    work = [4 * m * m * n + 2 * m**3 for m, n in ((256, 1024), (128, 2048))]
    assert times[1] / times[0] == pytest.approx(8 * work[0] / work[1])


@pytest.mark.filterwarnings("error")
def test_packed_matrices_and_vectors_are_timed():
    """A matrix that is cut has no parts; others take their time by bytes; nothing is warned of."""
    model = nn.ModuleDict({"qkv": nn.Linear(768, 2304), "norm": nn.LayerNorm(768)})
    optimizer = Muon(model)
    alone = Muon([{"params": [model["norm"].weight], "use_muon": False}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimizer_seconds(optimizer, torch.device("cpu"), repeats=2) > 0
    assert 0 < optimizer_seconds(alone, torch.device("cpu")) < 0.1
    assert [group["split"] for group in optimizer.param_groups] == [3, None]
