"""Loops of accelerate within a budget of memory."""

import pytest
import torch
from headroom.memory import track
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from helpers.bits import assert_same_bits
from helpers.fitting import samples, stack

accelerate = pytest.importorskip("accelerate")

from headroom.integrations.accelerate import fit  # noqa: E402


@pytest.fixture
def make():
    """Makes accelerators, whose state is that of the process."""

    def make(**options):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        return accelerate.Accelerator(cpu=True, **options)

    yield make
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def batches(count=6, size=4):
    rows = samples(count * size)
    return [
        {name: torch.stack([row[name] for row in rows[k : k + size]]) for name in rows[0]}
        for k in range(0, len(rows), size)
    ]


def plain(accelerator, data, optimizer=torch.optim.SGD, **options):
    """The losses and the model of a loop of accelerate."""
    model = stack(**options)
    model, optimizer = accelerator.prepare(model, optimizer(model.parameters(), lr=0.05))
    schedule = accelerator.prepare(ExponentialLR(optimizer, 0.7))
    torch.manual_seed(6)
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


def fitted(accelerator, data, budget, optimizer=torch.optim.SGD, told=None, allow=(), **options):
    """The same loop, fitted into a budget; and what was found, and the peak of the loop."""
    model = stack(**options)
    found = fit(
        accelerator,
        model,
        data[0],
        budget=budget,
        optimizer=lambda params: optimizer(params, lr=0.05),
        allow=allow,
        tell=(told if told is not None else []).append,
    )
    assert found.model is model
    tracked = track(model, found.optimizer)
    model, optimizer = accelerator.prepare(found.model, found.optimizer)
    schedule = accelerator.prepare(ExponentialLR(optimizer, 0.7))
    torch.manual_seed(6)
    losses = []
    if told is None:
        tracked.__enter__()
    for batch in ({name: x.clone() for name, x in one.items()} for one in data):
        with accelerator.accumulate(model):
            loss = found.backward(model, batch)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if told is None:
        tracked.__exit__(None, None, None)
        return losses, model, found, tracked.peak_bytes
    return losses, model, found, found.measured.peak


def test_levels_leave_the_bits(make):
    data = batches(4, size=1)
    want, other = plain(make(), data)
    most = fit(
        make(),
        stack(),
        data[0],
        budget="1 GiB",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        tell=lambda text: None,
    ).fitted.before_peak
    told = []
    losses, model, found, peak = fitted(make(), data, int(0.85 * most), told=told)
    assert "L5" in found.fitted.choice.levels
    assert losses == want
    assert_same_bits(model.parameters(), other.parameters())
    assert peak <= 0.85 * most
    assert len(told) == 2 and "measured peak" in told[1]


@pytest.mark.slow
def test_micro_batches_within_the_accumulation_of_the_loop(make):
    data = batches(6)
    want, other = plain(make(gradient_accumulation_steps=2), data, torch.optim.AdamW, dropout=0.0)
    accelerator = make(gradient_accumulation_steps=2)
    most = fit(accelerator, stack(), data[0], budget="1 GiB", tell=lambda text: None)
    budget = int(0.6 * most.fitted.before_peak)
    losses, model, found, peak = fitted(
        make(gradient_accumulation_steps=2),
        data,
        budget,
        torch.optim.AdamW,
        dropout=0.0,
    )
    assert found.fitted.choice.micro_batches > 2
    assert losses == pytest.approx(want, rel=1e-4)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)
    assert peak <= budget


def test_what_is_refused(make):
    accelerator, batch = make(), batches(1)[0]
    with pytest.raises(TypeError, match="fit: accelerator is Linear, wanted an Accelerator"):
        fit(nn.Linear(2, 2), stack(), batch, budget="1 GiB")
    wrapped = nn.parallel.DataParallel(stack())
    with pytest.raises(ValueError, match="the model is prepared already"):
        fit(accelerator, wrapped, batch, budget="1 GiB")
    with pytest.raises(ValueError, match="budget is 1.00 KiB, and the loop itself holds"):
        fit(accelerator, stack(), batch, budget="1 KiB")
