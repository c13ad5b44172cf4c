"""Headroom's optimizers in loops of accelerate."""

import copy

import headroom
import pytest
import torch
from torch.optim import lr_scheduler

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.loops import ADAMW, OURS, assert_same_run, batches, build, made, plain_run
from helpers.modes import EVERY, entries


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


@OURS
def test_accelerate_has_the_bits_of_a_plain_loop(make, accelerator):
    data = batches(6)
    model = build()
    optimizer = make(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.7)
    model, prepared, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for x in data:
        prepared.zero_grad()
        accelerator.backward(model(x).square().mean())
        prepared.step()
        scheduler.step()
        assert not prepared.step_was_skipped

    reference, other, _ = plain_run(data, make, lambda o: lr_scheduler.ExponentialLR(o, 0.7))
    assert_same_run(model, optimizer, reference, other)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] < 1e-2


@pytest.mark.parametrize("name", EVERY)
def test_accelerate_prepares_moves_saves_and_loads(name, accelerator, tmp_path):
    """prepare() loads the live state_dict into the optimizer that it came from."""
    model, optimizer = made(name)
    modes.train(model, optimizer, range(2))
    before = copy.deepcopy(entries(optimizer))
    model, prepared = accelerator.prepare(model, optimizer)
    for left, right in zip(entries(optimizer), before):
        assert list(left) == list(right)
        assert_same_bits(left.values(), right.values())

    def train(steps):
        for step in steps:
            prepared.zero_grad()
            accelerator.backward(modes.loss_of(model, modes.batch(step)))
            prepared.step()

    train([2])
    accelerator.save_state(tmp_path)
    train(range(3, 6))
    reference = made(name)
    modes.train(*reference, range(6))
    assert_same_run(model, optimizer, *reference)
    accelerator.load_state(tmp_path)
    assert all(entry.get("step", 3) == 3 for entry in entries(optimizer))  # SGD counts none
    train(range(3, 6))
    assert_same_run(model, optimizer, *reference)


def test_what_takes_an_optimizer_takes_the_one_that_accelerate_wraps(accelerator):
    model = build().to(torch.bfloat16)
    optimizer = ADAMW(model.parameters(), lr=1e-2, master="remainder16")
    model, prepared = accelerator.prepare(model, optimizer)
    assert type(prepared) is not ADAMW
    with headroom.release_gradients(model, prepared):
        accelerator.backward(model(batches(1)[0].bfloat16()).square().mean())
        prepared.step()
    weights = headroom.optim.master_weights(prepared, model)
    for ours, plain in zip(
        weights.values(), headroom.optim.master_weights(optimizer, model).values()
    ):
        assert ours.dtype == torch.float32 and torch.equal(ours, plain)
    doubled = {name: 2 * weight for name, weight in weights.items()}
    headroom.optim.load_master_weights(prepared, doubled, model)
    for name, weight in headroom.optim.master_weights(optimizer, model).items():
        assert torch.equal(weight, doubled[name])


@pytest.mark.parametrize("other", [torch.optim.AdamW, dict], ids=["torch's", "no optimizer"])
def test_what_takes_an_optimizer_refuses_others(other):
    model = build()
    thing = other(model.named_parameters())
    for function, args in (
        ("master_weights", (thing, model)),
        ("load_master_weights", (thing, {}, model)),
        ("load_sharded", ({}, model, thing)),
        ("release_gradients", (model, thing)),
    ):
        with pytest.raises(
            TypeError, match=rf"{function}\(\) wants an optimizer of headroom.optim"
        ):
            getattr(headroom.optim, function)(*args)


def test_accelerate_tells_a_skipped_step(accelerator):
    model, optimizer = build(), None
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, prepared = accelerator.prepare(model, optimizer)
    skipped = []
    for k, x in enumerate(batches(3)):
        prepared.zero_grad()
        accelerator.backward(model(x).square().mean())
        if k == 1:
            model[0].weight.grad[0, 0] = float("inf")
        prepared.step()
        skipped.append(prepared.step_was_skipped)
    assert skipped == [False, True, False]
    assert all(entry["step"] == 2 for entry in entries(optimizer))
