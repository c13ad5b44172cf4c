"""torch's GradScaler around steps of Headroom's optimizers."""

import copy

import pytest
import torch

from helpers.bits import assert_same_bits
from helpers.loops import ADAMW, assert_close, assert_same_run, batches, build, plain_run
from helpers.modes import entries


def scaled_run(cls, data, overflows, unscale, clip=None):
    """Returns the model, the optimizer, the scaler and for every step whether it was taken."""
    model = build()
    optimizer = cls(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    taken = []
    for k, x in enumerate(data):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if k in overflows:
            model[0].weight.grad[0, 0] = overflows[k]
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        scaler.step(optimizer)
        scaler.update()
        after = [model.state_dict(), optimizer.state_dict()]
        taken.append(not torch.equal(before[0]["0.weight"], after[0]["0.weight"]))
        if not taken[-1]:
            assert_same_bits(before[0].values(), after[0].values())
            for i, entry in after[1]["state"].items():
                assert_same_bits(before[1]["state"][i].values(), entry.values())
    return model, optimizer, scaler, taken


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_grad_scaler_skips_the_overflow_and_nothing_else(unscale, value):
    data, overflows = batches(7), {1: value, 2: value, 5: value}
    model, optimizer, scaler, taken = scaled_run(ADAMW, data, overflows, unscale)
    assert taken == [k not in overflows for k in range(7)]
    assert all(entry["step"] == 4 for entry in entries(optimizer))
    theirs = scaled_run(torch.optim.AdamW, data, overflows, unscale)
    assert_close(model, theirs[0])
    assert theirs[3] == taken
    assert scaler.state_dict() == theirs[2].state_dict()
    # The scale is a power of two, so unscaled gradients are those of a run without it.
    good = plain_run([x for k, x in enumerate(data) if k not in overflows], ADAMW)[:2]
    assert_same_run(model, optimizer, *good)


def test_grad_scaler_with_clipping():
    data, overflows = batches(4), {1: float("inf")}
    ours = scaled_run(ADAMW, data, overflows, True, clip=0.05)
    theirs = scaled_run(torch.optim.AdamW, data, overflows, True, clip=0.05)
    assert_close(ours[0], theirs[0])
    assert ours[3] == theirs[3] == [True, False, True, True]


def test_scalars_of_the_step_do_what_the_scaler_does():
    """grad_scale and found_inf as attributes: unscaled and skipped inside the op."""
    data, overflows = batches(5), {2: float("inf")}
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    for k, x in enumerate(data):
        optimizer.zero_grad()
        (model(x).square().mean() * 1024).backward()
        if k in overflows:
            model[0].weight.grad[0, 0] = overflows[k]
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.found_inf.fill_(not finite)
        optimizer.step()
    good = plain_run([x for k, x in enumerate(data) if k not in overflows], ADAMW)[:2]
    assert_same_run(model, optimizer, *good)


def test_a_scaler_with_two_optimizers_skips_one():
    model = build()
    first, second = ADAMW(model[0].parameters()), ADAMW(model[2].parameters())
    scaler = torch.amp.GradScaler("cpu")
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(batches(1)[0]).square().mean()).backward()
    model[0].bias.grad[0] = float("nan")
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    after = model.state_dict()
    assert_same_bits([before["0.weight"], before["0.bias"]], [after["0.weight"], after["0.bias"]])
    assert not torch.equal(before["2.weight"], after["2.weight"])
    assert len(first.state) == 0 and len(second.state) == 2
