"""Weights that someone else writes between two steps: what was written counts, in every mode."""

import copy

import headroom
import pytest
import torch
from headroom._core.weight_modes import RESIDUALS
from headroom.optim import Adafactor, AdamW, AdamW8bit, master_weights
from torch import nn
from torch.optim.swa_utils import AveragedModel

from helpers.modes import WEIGHTS

OPTIMIZERS = [
    (AdamW, {"state_dtype": torch.float32}),
    (AdamW8bit, {"min_8bit_size": 64}),
    (Adafactor, {}),
]
WAYS = [
    *[(dict(way), torch.bfloat16) for way in ({}, *WEIGHTS)],
    *[(dict(way), torch.float16) for way in ({}, *WEIGHTS) if way.get("master", "f32") == "f32"],
]


def name_of(value):
    if isinstance(value, dict):
        return "-".join(map(str, value.values())) or "plain"
    return getattr(value, "__name__", str(value).removeprefix("torch."))


def build(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)).to(dtype)


def train(model, optimizer, steps=3, lr=1e-2):
    dtype = next(model.parameters()).dtype
    for group in optimizer.param_groups:
        group["lr"] = lr
    for step in range(steps):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        (model(x) - x).float().square().mean().backward()
        optimizer.step()


def trained(cls, options, way, dtype):
    """With residuals of every sign, as in the middle of a run."""
    model = build(dtype)
    optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.0, **options, **way)
    train(model, optimizer)
    return model, optimizer


# ---- Who writes ----------------------------------------------------------------------------------


def set_to_zero(model, tmp_path):
    for param in model.parameters():
        param.data.zero_()


def mask(model, tmp_path):
    for param in model.parameters():  # half of them, to 0 and to -0
        param.mul_(torch.arange(param.numel()).view_as(param) % 2)


def clamp(model, tmp_path):
    for param in model.parameters():
        param.clamp_(-0.05, 0.05)


def load_with_zero_bias(model, tmp_path):
    other = build(next(model.parameters()).dtype, seed=5)
    nn.init.zeros_(other[0].bias)
    model.load_state_dict(other.state_dict())


def load_file(model, tmp_path):
    other = build(next(model.parameters()).dtype, seed=6)
    nn.init.zeros_(other[2].bias)
    headroom.save_state(tmp_path / "other", model=other, progress=False)
    headroom.load_state(tmp_path / "other", model=model)


def swap_in_the_average(model, tmp_path):
    average = AveragedModel(model)
    average.update_parameters(build(next(model.parameters()).dtype, seed=7))
    average.update_parameters(model)
    for param, mean in zip(model.parameters(), average.module.parameters()):
        param.copy_(mean)


def replace_data(model, tmp_path):
    for param in model.parameters():
        param.data = torch.full_like(param, -0.75)


WRITERS = [
    set_to_zero,
    mask,
    clamp,
    load_with_zero_bias,
    load_file,
    swap_in_the_average,
    replace_data,
]


# ---- What the optimizer makes of it --------------------------------------------------------------


def written_weights(model):
    return {param: param.detach().clone() for param in model.parameters()}


def half_unit(weight):
    """Half the distance of a number to the next, 0 at 0."""
    bits = 8 if weight.dtype == torch.bfloat16 else 11
    fraction, exponent = torch.frexp(weight.double())
    return torch.where(
        fraction == 0, 0.0, torch.ldexp(torch.ones_like(fraction), exponent - 1 - bits)
    )


def assert_read_as_written(optimizer, written, way):
    """The weights of the next step, in float32, as headroom.h says."""
    for param, weight in master_weights(optimizer).items():
        off = (weight.double() - written[param].double()).abs()
        if way.get("master") == "f32":  # a weight that was not changed keeps all its bits
            assert torch.equal(weight.to(param.dtype), written[param])
        elif way.get("rounding") == "kahan":
            assert (off <= half_unit(written[param])).all()
        elif "master" in way:
            assert (off <= half_unit(written[param]) + 2.0**-134).all()
        else:
            assert not off.any()


@pytest.mark.parametrize("write", WRITERS, ids=name_of)
@pytest.mark.parametrize("way, dtype", WAYS, ids=name_of)
@pytest.mark.parametrize("cls, options", OPTIMIZERS, ids=name_of)
def test_what_was_written_counts(cls, options, way, dtype, write, tmp_path):
    model, optimizer = trained(cls, options, way, dtype)
    old = written_weights(model)
    with torch.no_grad():
        write(model, tmp_path)
    written = written_weights(model)
    residuals = {
        param: {k: v.clone() for k, v in entry.items() if k in RESIDUALS}
        for param, entry in optimizer.state.items()
    }
    assert_read_as_written(optimizer, written, way)
    for param, entry in residuals.items():  # reading changes nothing
        assert all(torch.equal(optimizer.state[param][name], entry[name]) for name in entry)

    train(model, optimizer, 1, lr=0.0)
    for param, weight in written.items():
        if way.get("rounding") == "kahan":
            off = (param.detach().double() - weight.double()).abs()
            assert (off <= 2 * half_unit(weight)).all()
        else:
            assert torch.equal(param.detach(), weight)
        if way.get("master") == "f32":
            changed = old[param] != weight
            master = optimizer.state[param]["master"]
            assert changed.any() and torch.equal(master[changed], weight.float()[changed])
    assert_read_as_written(optimizer, written_weights(model), way)

    train(model, optimizer, 3)
    for param, weight in master_weights(optimizer).items():
        assert torch.isfinite(weight).all() and torch.isfinite(param.detach()).all()


@pytest.mark.parametrize("way, dtype", WAYS, ids=name_of)
@pytest.mark.parametrize("cls, options", OPTIMIZERS, ids=name_of)
def test_weights_that_are_swapped_out_and_back_lose_nothing(cls, options, way, dtype, tmp_path):
    model, optimizer = trained(cls, options, way, dtype)
    before = master_weights(optimizer)
    own = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        swap_in_the_average(model, tmp_path)  # to evaluate it, say
    model.load_state_dict(own)
    after = master_weights(optimizer)
    assert all(torch.equal(after[param], before[param]) for param in before)


@pytest.mark.parametrize("way, dtype", WAYS, ids=name_of)
def test_weights_written_while_frozen_stay(way, dtype):
    model, optimizer = trained(AdamW, {}, way, dtype)
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[0].weight.zero_()
    train(model, optimizer, 2)
    assert not model[0].weight.any()
    model[0].requires_grad_(True)
    train(model, optimizer, 1, lr=0.0)
    assert not model[0].weight.any()


@pytest.mark.parametrize("master", ["f32", "remainder16", "remainder8"])
def test_a_pruned_weight_goes_on_from_zero(master):
    """Against float32 from the same moments: a weight of 0 moves by its update alone."""
    param = nn.Parameter(torch.linspace(-1, 1, 4096).bfloat16())
    optimizer = AdamW([param], lr=1e-3, weight_decay=0.0, master=master)
    for _ in range(3):
        param.grad = torch.linspace(1, -2, 4096).bfloat16()
        optimizer.step()
    param.data.zero_()
    state = optimizer.state[param]
    wide = nn.Parameter(torch.zeros(4096))
    reference = torch.optim.AdamW([wide], lr=1e-3, weight_decay=0.0)
    reference.state[wide] = {
        "step": torch.tensor(3.0),
        "exp_avg": state["exp_avg"].clone(),
        "exp_avg_sq": state["exp_avg_sq"].clone(),
    }
    wide.grad = param.grad.float()
    reference.step()
    optimizer.step()
    got = master_weights(optimizer)[param]
    torch.testing.assert_close(got, wide.detach(), rtol=2.0**-15, atol=0)


def test_a_written_nan_or_infinity_is_not_hidden():
    for way in ({}, *WEIGHTS):
        param = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        optimizer = AdamW([param], lr=1e-3, **way)
        param.grad = torch.ones_like(param)
        optimizer.step()
        param.data[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        weight = master_weights(optimizer)[param]
        assert weight.isnan().tolist() == [True] + 5 * [False]
        if way.get("master", "f32") == "f32":
            assert weight[1:3].tolist() == [torch.inf, -torch.inf]
        assert (weight[1:3].abs() > 3.3e38).all()  # larger than any number of bfloat16


def test_a_master_of_nan_is_mended_by_writing():
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-3, master="f32")
    param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert param.isnan().all() and optimizer.state[param]["master"].isnan().all()
    param.data.fill_(-0.0)
    assert torch.equal(master_weights(optimizer)[param], torch.full((64,), -0.0))
