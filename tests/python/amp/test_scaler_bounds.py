"""headroom.amp.GradScaler's bounds and hysteresis, and what it says of gradients that overflow."""

import math
import re

import pytest
import torch

from helpers.scalers import OURS, TORCHS, Scaler, parameters, run, set_grads, start


def test_200_overflows_in_a_row_and_back(device):
    """Torch's scale is 0 then, and every step is skipped for good."""
    params = parameters(device=device)
    optimizer, scaler = OURS(params), Scaler(device, growth_interval=1)
    scales = run(scaler, optimizer, params, [1] * 200)
    assert scaler.get_scale() == 2.0**-126 == min(scales + [scaler.get_scale()])
    set_grads(params, scaler.get_scale(), 0)
    assert scaler.step(optimizer) == 0
    scaler.update()
    assert scaler.get_scale() == 2.0**-125 and all(p.isfinite().all() for p in params)


def test_growth_ends_at_the_largest_power_of_two(device):
    params = parameters(device=device)
    scaler = Scaler(device, growth_interval=1)
    start(scaler, device)
    set_grads(params, 1.0, 0)
    optimizer = OURS(params)
    for _ in range(200):
        assert scaler.step(optimizer) == 0
        scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_bounds(device):
    params = parameters(device=device)
    scaler = Scaler(device, min_scale=2.0**14, max_scale=1e5, growth_interval=1)
    scales = run(scaler, OURS(params), params, [1, 1, 1, 0, 0, 0, 0, 0])
    assert scales == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**15, 2.0**16, 1e5, 1e5]


def test_hysteresis(device):
    params = parameters(device=device)
    scaler = Scaler(device, hysteresis=3, growth_interval=2)
    scales = run(scaler, OURS(params), params, [1, 1, 1, 1, 0, 0, 1, 1, 1])
    exponents = [int(math.log2(s)) for s in scales]
    assert exponents == [16, 16, 16, 15, 14, 14, 15, 15, 15] and scaler.get_scale() == 2.0**14


def named(device="cpu"):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(device)
    optimizer = OURS(model.named_parameters())
    params = list(model.parameters())
    for p in params:
        p.grad = torch.ones_like(p)
    return model, optimizer, params


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_culprit(unscale, device):
    _, optimizer, params = named(device)
    scaler = start(Scaler(device), device)
    assert scaler.culprit() is None
    params[1].grad[0] = math.nan
    params[2].grad[0, 0] = math.inf
    if unscale:
        scaler.unscale_(optimizer)
        assert scaler.culprit() == "0.bias"
    scaler.step(optimizer)
    assert scaler.culprit() == "0.bias"
    scaler.update()
    assert scaler.culprit() == "0.bias"  # of the step before the update
    for p in params:
        p.grad = torch.ones_like(p)
    scaler.step(optimizer)
    assert scaler.culprit() is None


def test_culprit_of_a_step_before_a_new_scale():
    _, optimizer, params = named()
    scaler = start(Scaler("cpu"))
    params[1].grad[0] = math.nan
    scaler.step(optimizer)
    scaler.update(128.0)
    assert scaler.culprit() == "0.bias"
    params[1].grad[0] = 1.0
    scaler.step(optimizer)
    assert scaler.culprit() is None


@pytest.mark.parametrize("name", TORCHS)
def test_culprit_without_names_and_of_torchs_optimizers(name):
    params = parameters()
    optimizer = TORCHS[name]([{"params": params[:1]}, {"params": params[1:]}])
    scaler = start(Scaler("cpu"))
    set_grads(params, 1.0, 0, math.nan)
    scaler.step(optimizer)
    assert scaler.culprit() == "parameter 0 of group 1"


def test_culprit_of_the_second_optimizer():
    params, others = parameters(), parameters()
    scaler = start(Scaler("cpu"))
    set_grads(params, 1.0, 0)
    set_grads(others, 1.0, 0, math.inf)
    for optimizer in (OURS(params), OURS([("a", others[0]), ("b", others[1]), ("c", others[2])])):
        scaler.step(optimizer)
    assert scaler.culprit() == "b"


def test_too_many_skips(device):
    _, optimizer, params = named(device)
    scaler = start(Scaler(device, init_scale=1024.0, max_consecutive_skips=2), device)
    params[3].grad[1] = math.nan
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(10):  # on a GPU it may come late
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.is_available() and torch.cuda.synchronize()
    text = str(caught.value)
    assert re.search(r"^\d+ steps in a row were skipped", text)
    assert "max_consecutive_skips=2" in text
    assert "512 -> 256 -> 128" in text and "that of 1.bias" in text
    if device == "cpu":
        assert text.startswith("3 steps") and scaler.get_scale() == 128
    params[3].grad[1] = 0.0  # training may go on
    scaler.step(optimizer)
    scaler.update()


def test_a_long_history_ends_with_the_last_8_scales():
    params = parameters()
    scaler = Scaler("cpu", init_scale=2.0**12, max_consecutive_skips=9)
    words = re.escape("The loss scale went 512 -> 256 -> 128 -> 64 -> 32 -> 16 -> 8 -> 4; the")
    with pytest.raises(RuntimeError, match=f"^10 steps in a row.*{words}"):
        run(scaler, TORCHS["sgd"](params), params, [1] * 10)


def test_skips_that_are_not_in_a_row(device):
    params = parameters(device=device)
    scaler = Scaler(device, max_consecutive_skips=2)
    run(scaler, OURS(params), params, [1, 1, 0] * 10)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, OURS])
def test_no_patience_at_all(optimizer_class):
    params = parameters()
    scaler = Scaler("cpu", max_consecutive_skips=0)
    with pytest.raises(RuntimeError, match="^1 steps in a row"):
        run(scaler, optimizer_class(params), params, [0, 0, 1])
