"""Trainings that an optimizer whose state lies elsewhere must repeat to the bit: all that a loop
does, and how two runs of it are compared."""

import headroom
import pytest
import torch
from headroom.optim import AdamW, AdamW8bit

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.modes import EVERY, entries


def assert_same_states(left, right):
    for one, other in zip(entries(left), entries(right)):
        assert one.keys() == other.keys()
        assert_same_bits(one.values(), [other[key] for key in one])


def assert_same_run(left, right):
    assert_same_bits(left[0].parameters(), right[0].parameters())
    assert_same_states(left[1], right[1])


def pair(name, dtype=torch.bfloat16, **options):
    """Returns two equal models, each with an optimizer of this name."""
    built = [modes.build(dtype) for _ in range(2)]
    return [(model, EVERY[name].make(model.parameters(), **options)) for model in built]


def assert_train_alike(make, loop, begin):
    """Runs a loop with an ordinary optimizer and one that ``begin`` is called for, and compares all
    that they have. Returns the model and the optimizer of the latter."""
    runs = []
    for is_ordinary in (True, False):
        torch.manual_seed(0)
        model = modes.build(torch.bfloat16)
        optimizer = make(model)
        if not is_ordinary:
            begin(optimizer)
        runs.append((model, optimizer, loop(model, optimizer)))
    (*ordinary, one), (*found, other) = runs
    assert_same_run(ordinary, found)
    assert one == other
    return found


# ---- loops ---------------------------------------------------------------------------------------


def in_groups(model):
    params = list(model.parameters())
    rate = torch.tensor(0.02)
    groups = [{"params": params[:3], "lr": rate}, {"params": params[3:], "weight_decay": 0.3}]
    return AdamW(groups, lr=1e-2, master="remainder16")


def scheduled(model, optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(4):
        modes.train(model, optimizer, [step])
        scheduler.step()
    return [float(group["lr"]) for group in optimizer.param_groups]


def clipped(spoil):
    """Returns a loop with a step that is skipped, before which ``spoil(model)`` is called."""

    def loop(model, optimizer):
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            modes.loss_of(model, modes.batch(step)).backward()
            if step == 2:
                spoil(model)
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
        with pytest.warns(UserWarning, match="skipped"):
            assert optimizer.skipped_steps == 1
        return [norm for norm in norms if norm == norm]

    return loop


def scaled(kind):
    """Returns a loop with a scaler of this kind, and an overflow."""

    def loop(model, optimizer):
        scaler = kind("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(modes.loss_of(model, modes.batch(step))).backward()
            if step == 1:
                model.outer.bias.grad[3] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    return loop


def released(clip, bucket_bytes):
    """Returns a loop with released gradients."""

    def loop(model, optimizer):
        options = {"clip": clip, "bucket_bytes": bucket_bytes}
        handle = headroom.release_gradients(model, optimizer, **options)
        for step in range(4):
            if clip == "two-pass":
                with handle.measure():
                    modes.loss_of(model, modes.batch(step)).backward()
            modes.loss_of(model, modes.batch(step)).backward()
            optimizer.step()
        handle.remove()

    return loop


def accumulated(model, optimizer):
    accumulator = headroom.GradAccumulator(model)
    handle = headroom.release_gradients(model, optimizer, accumulator=accumulator)
    for step in range(3):
        for micro in range(2):
            with accumulator.micro_batch():
                modes.loss_of(model, modes.batch(2 * step + micro)).backward()
        accumulator.finish()
        optimizer.step()
    handle.remove()


def without_mix(model):
    params = [p for p in model.parameters() if p is not model.mix]
    return AdamW8bit(params, lr=1e-2, min_8bit_size=64)


def with_mix_later(model, optimizer):
    """Freezes a layer now and then, and gives the optimizer the parameter that it lacked."""
    for step in range(6):
        optimizer.zero_grad()
        model.inner.requires_grad_(step in (0, 4, 5))
        modes.loss_of(model, modes.batch(step)).backward()
        if step == 3:
            optimizer.add_param_group({"params": [model.mix], "lr": 0.5})
        optimizer.step()
