"""Loops of accelerate within a budget of memory."""

import gc
import re
import weakref

import pytest
import torch
from headroom.fitting import Choice, DoesNotFit
from headroom.fitting.search import candidates
from headroom.memory import track
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import _global_optimizer_post_hooks

from helpers.bits import assert_same_bits
from helpers.fitted_models import Plain
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


def fitted(
    accelerator,
    data,
    budget,
    optimizer=torch.optim.SGD,
    told=None,
    allow=(),
    choice=None,
    **options,
):
    """The same loop, fitted into a budget; and what was found, and the peak of the loop."""
    model = stack(**options)
    found = fit(
        accelerator,
        model,
        data[0],
        budget=budget,
        optimizer=lambda params: optimizer(params, lr=0.05),
        allow=allow,
        choice=choice,
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


def test_a_resumed_run_takes_its_choice_again_and_measures_nothing(make, monkeypatch):
    monkeypatch.setattr(candidates, "measure_blocks", None)
    data, told = batches(4, size=1), []
    stored = Choice(("L5", "L5", "L0", "L5")).to_json()
    losses, model, found, peak = fitted(make(), data, "1 GiB", told=told, choice=stored)
    assert found.fitted.choice.to_json() == stored and found.fitted.is_given
    want, other = plain(make(), data)
    assert losses == want
    assert_same_bits(model.parameters(), other.parameters())
    assert 0.9 * peak <= found.fitted.predicted_peak
    assert re.search(r"measured step [\d.]+ ms$", told[1])  # nothing was predicted


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


def padded(rows):
    """A batch with very different numbers of labels that count, and one row without any."""
    tokens = torch.randint(61, (rows, 9), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    for k in range(rows):
        labels[k, 9 - 2 * k :] = -100
    labels[0] = -100
    return {"ids": tokens, "labels": labels}


@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_padded_and_smaller_batches_train_as_whole_ones(accumulated, make, monkeypatch):
    """In float64, with clipping."""
    from headroom.integrations import accelerate as ours

    fit_in_loop = ours.fit_in_loop

    def cut(*args, only, **options):
        assert 3 * accumulated in only["micro_batches"]
        return fit_in_loop(*args, only=only | {"micro_batches": (3 * accumulated,)}, **options)

    monkeypatch.setattr(ours, "fit_in_loop", cut)
    data = [padded(6), padded(6), padded(5), padded(2)]
    models = []
    for fits in (False, True):
        accelerator = make(gradient_accumulation_steps=accumulated)
        torch.manual_seed(0)
        model = Plain().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = None
        if fits:
            options = dict(budget="1 GiB", optimizer=optimizer, tell=lambda text: None)
            found = fit(accelerator, model, data[0], max_grad_norm=0.1, **options)
        prepared, stepped = accelerator.prepare(model, optimizer)
        losses = []
        for batch in data:
            with accelerator.accumulate(prepared):
                if found is not None:
                    loss = found.backward(prepared, batch)
                else:
                    loss = prepared(**batch)
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                stepped.step()
                stepped.zero_grad()
            losses.append(float(loss.detach()))
        models.append((model, losses))
    (want, expected), (got, losses) = models
    assert losses == pytest.approx(expected, rel=1e-12)
    for mine, theirs in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def test_a_loss_that_is_a_sum_is_not_cut(make):
    def loss(output, batch):
        return output["loss"] * len(batch["x"])

    data, notes = batches(1)[0], []
    found = fit(make(), stack(), data, budget="1 GiB", loss=loss, tell=notes.append)
    assert found.fitted.choice.micro_batches == 1
    assert any("do not add up" in note for note in found.fitted.notes)


def test_what_is_refused(make):
    accelerator, batch = make(), batches(1)[0]
    with pytest.raises(TypeError, match="fit: accelerator is Linear, wanted an Accelerator"):
        fit(nn.Linear(2, 2), stack(), batch, budget="1 GiB")
    wrapped = nn.parallel.DataParallel(stack())
    with pytest.raises(ValueError, match="the model is prepared already"):
        fit(accelerator, wrapped, batch, budget="1 GiB")
    with pytest.raises(ValueError, match="budget is 1.00 KiB, and the loop itself holds"):
        fit(accelerator, stack(), batch, budget="1 KiB")


def hooks_of_the_process():
    return len(_global_optimizer_post_hooks)


def found_for(accelerator, data, model=None, told=None):
    return fit(
        accelerator,
        model or stack(),
        data[0],
        budget="1 GiB",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        choice=Choice(("L0",) * 4).to_json(),
        tell=(told if told is not None else []).append,
    )


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_nothing_of_a_fit_outlives_it(make, steps):
    before, data = hooks_of_the_process(), batches(4, size=1)
    accelerator = make()
    found = found_for(accelerator, data)
    alive = weakref.ref(found.model)
    model, optimizer = accelerator.prepare(found.model, found.optimizer)
    for batch in data[:steps]:
        found.backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    assert hooks_of_the_process() == before + (steps < 4)  # while they run none can be removed
    accelerator.free_memory()
    del found, model, optimizer
    gc.collect()
    assert alive() is None and hooks_of_the_process() == before


def test_a_recording_ends_with_the_fit_whose_step_raised(make):
    data, accelerator = batches(1, size=1), make()
    found = found_for(accelerator, data)
    model, optimizer = accelerator.prepare(found.model, found.optimizer)
    found.backward(model, data[0])  # what follows raises, and nothing else of the loop runs
    with pytest.raises(RuntimeError, match="a profiler is running already"):
        track(model).__enter__()
    del found
    with track(model):
        pass


def test_a_step_that_is_not_made_is_left_out(make):
    """As where the loop skips a batch after an error, or a scaler skips a step."""
    data, told, accelerator = batches(4, size=1), [], make()
    found = found_for(accelerator, data, told=told)
    model, optimizer = accelerator.prepare(found.model, found.optimizer)
    seen = []
    record = found.measured._record
    found.measured._record = lambda batch: (seen.append("recorded"), record(batch))
    for k, batch in enumerate([data[0], *data]):
        found.backward(model, batch)
        if k:
            optimizer.step()
        optimizer.zero_grad()
        seen.append("stepped" if k else "skipped")
    assert seen == ["recorded", "skipped", *["recorded", "stepped"] * 2, "stepped", "stepped"]
    assert found.measured.has_ended and len(told) == 2


@pytest.mark.slow
def test_the_host_holds_what_the_device_has_no_room_for(make):
    accelerator, data = make(), batches()
    with pytest.raises(DoesNotFit) as caught:
        fit(accelerator, stack(), data[0], budget="250 KiB", optimizer=torch.optim.AdamW)
    found = fit(
        accelerator, stack(), data[0], budget=int(0.95 * caught.value.least) + 173_000,
        host_budget="1 GiB", optimizer=torch.optim.AdamW, tell=lambda text: None,
    )  # fmt: skip
    assert found.fitted.choice.offload
    model, optimizer = accelerator.prepare(found.model, found.optimizer)
    for batch in data[:2]:
        with accelerator.accumulate(model):
            found.backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.optimizer.offload_handle.memory().host > 0
