"""convert_state: states of SGD and Lion, against bitsandbytes and torch themselves."""

import copy

import headroom
import pytest
import torch

from helpers.conversions import LR, assert_same_entries, clones, convert, parameters, run, torch_sgd
from helpers.roundtrip import through_file

OPTIM = headroom.optim
SGD = {"lr": LR, "momentum": 0.9, "weight_decay": 0.1}
LION = {"lr": LR, "weight_decay": 0.1}
OURS = [(OPTIM.SGD, SGD), (OPTIM.SGD8bit, SGD), (OPTIM.Lion, LION), (OPTIM.Lion8bit, LION)]


def bitsandbytes(cls):
    """The class of bitsandbytes with the name of one of ours."""
    return getattr(pytest.importorskip("bitsandbytes").optim, cls.__name__)


def home_of(cls):
    return "headroom-8bit" if cls.__name__.endswith("8bit") else "headroom"


def goes_on_alike(theirs, optimizer, ours, resumed):
    """For a step: bitsandbytes rounds ties of codes in its own way."""
    run(theirs, optimizer, 1, seed=7)
    run(ours, resumed, 1, seed=7)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5 * LR)


@pytest.mark.parametrize("cls, options", OURS)
def test_headroom_goes_on_as_bitsandbytes_would(cls, options):
    params, optimizer = run(ps := parameters(), bitsandbytes(cls)(ps, **options))
    rule = "sgd" if "momentum" in options else "lion"
    for source, given in ((optimizer, {}), (through_file(optimizer.state_dict()), {"rule": rule})):
        state, report = convert(source, home_of(cls), **given)
        assert report.is_lossless and not report.notes
        ours = clones(params)
        resumed = cls(ours, lr=1.0)
        resumed.load_state_dict(copy.deepcopy(state))
        group = resumed.param_groups[0]
        assert group["lr"] == LR and group["weight_decay"] == 0.1
        assert group["momentum"] == 0.9 if rule == "sgd" else group["betas"] == (0.9, 0.99)
    goes_on_alike(params, optimizer, ours, resumed)


@pytest.mark.parametrize("cls, options", OURS)
def test_bitsandbytes_goes_on_as_headroom_would(cls, options):
    params, optimizer = run(ps := parameters(), cls(ps, **options))
    theirs = clones(params)
    momentum = {"momentum": 0.5} if "momentum" in options else {}
    target = bitsandbytes(cls)(theirs, lr=1.0, **momentum)
    state, report = convert(optimizer, home_of(cls).replace("headroom", "bitsandbytes"))
    assert report.is_lossless
    target.load_state_dict(through_file(state))
    assert target.param_groups[0]["betas"] == ((0.9, 0) if "momentum" in options else (0.9, 0.99))
    goes_on_alike(theirs, target, params, optimizer)


@pytest.mark.parametrize("via", ["bitsandbytes", "bitsandbytes-8bit", "bitsandbytes-8bit-flat"])
@pytest.mark.parametrize("cls, options", OURS)
def test_there_and_back_is_the_same_to_the_bit(cls, options, via):
    _, optimizer = run(params := parameters(), cls(params, **options))
    there, first = convert(optimizer, via)
    rule = "sgd" if "momentum" in options else "lion"
    back, second = convert(through_file(there), home_of(cls), rule=rule)
    becomes, were = "8bit" in via, "8bit" in home_of(cls)
    assert first.is_lossless == (were or not becomes)
    assert second.is_lossless == (becomes or not were)
    if becomes == were:
        assert_same_entries(back, optimizer.state_dict())


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_of_torch(nesterov):
    """Into 8 bits and back, and the same bits from then on where nothing was lost."""
    options = {"lr": LR, "momentum": 0.9, "nesterov": nesterov}
    params, optimizer = run(ps := parameters(), torch.optim.SGD(ps, foreach=True, **options))
    state, report = convert(optimizer, "headroom-8bit")
    assert {loss.kind for loss in report.losses} == {"none", "rounded"}
    assert max(loss.relative for loss in report.losses) < 0.0072
    OPTIM.SGD8bit(parameters()).load_state_dict(state)
    back, report = convert(convert(optimizer, "headroom").state_dict, "torch")
    assert report.is_lossless and back["param_groups"][0]["nesterov"] == nesterov
    ours = clones(params)
    resumed = torch.optim.SGD(ours, lr=1.0, foreach=True)
    resumed.load_state_dict(back)
    run(params, optimizer, 2, seed=7)
    run(ours, resumed, 2, seed=7)
    for a, b in zip(params, ours, strict=True):
        assert torch.equal(a, b)
    _, report = convert(optimizer, "bitsandbytes")
    dropped = [loss.name for loss in report.losses if loss.kind == "dropped"]
    assert dropped == ["nesterov"] * nesterov and len(report.notes) == nesterov


def test_what_completes_16_bit_weights_is_carried():
    params = parameters(torch.bfloat16)
    _, optimizer = run(params, OPTIM.SGD(params, momentum=0.9, master="remainder16"))
    state, report = convert(optimizer, "headroom-8bit")
    assert all(loss.kind == "none" for loss in report.losses if loss.name == "remainder16")
    resumed = OPTIM.SGD8bit(clones(params), momentum=0.9, master="remainder16")
    resumed.load_state_dict(state)
    assert {loss.name for loss in convert(optimizer, "torch")[1].losses if loss.kind == "dropped"}


def test_a_bfloat16_run_of_torch_goes_on_with_the_bits_that_it_lacked():
    """By steps that bfloat16 loses, which torch's SGD never makes."""
    (param,) = params = [torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))]
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.5)
    resumed = OPTIM.SGD(clones(params), lr=1.0, momentum=0.9, master="remainder16")
    for step in range(60):
        if step == 10:
            assert torch.equal(param, torch.ones_like(param))
            resumed.load_state_dict(convert(optimizer, "headroom").state_dict)
            (param,) = resumed.param_groups[0]["params"]
            optimizer = resumed
        param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    assert (param < 0.96).all() and resumed.param_groups[0]["momentum"] == 0.5


def test_sgd_without_momentum():
    params, optimizer = run(ps := parameters(), torch.optim.SGD(ps, lr=LR))
    state, report = convert(optimizer, "headroom")
    assert state["state"] == {} and report.is_lossless
    resumed = OPTIM.SGD(clones(params), lr=1.0, momentum=0.9)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["momentum"] == 0
    half = parameters(torch.bfloat16)
    _, optimizer = run(half, OPTIM.SGD(half, rounding="stochastic"))
    state, report = convert(optimizer, "headroom-8bit")
    assert report.is_lossless and state["state"][0]["step"] == 3
    with pytest.raises(ValueError, match="has no momentum, which bitsandbytes' SGD needs"):
        convert(optimizer, "bitsandbytes")


@pytest.mark.parametrize("cls, rule", [(OPTIM.SGD, "sgd"), (OPTIM.Lion, "lion")])
def test_options_of_an_optimizer_without_states(cls, rule):
    state, report = convert(cls(parameters(), lr=LR), "bitsandbytes", from_="headroom")
    assert report.is_lossless and state["param_groups"][0]["eps"] == 0.0
    with pytest.raises(ValueError, match=f"apex has no {rule}: states of it convert between"):
        convert(cls(parameters(), lr=LR), "apex")


def test_whose_state_it_is_must_be_known():
    optim = pytest.importorskip("bitsandbytes").optim
    _, lion = run(ps := parameters(), optim.Lion(ps, lr=LR))
    with pytest.raises(ValueError, match="does not say whose it is: convert the optimizer itself"):
        convert(lion.state_dict(), "headroom")
    with pytest.raises(ValueError, match="is of another optimizer of bitsandbytes than Adam"):
        convert(lion.state_dict(), "headroom", rule="adam")
    _, rmsprop = run(ps, optim.RMSprop(ps, lr=LR))
    with pytest.raises(ValueError, match="RMSprop of bitsandbytes has no counterpart"):
        convert(rmsprop, "headroom")


@pytest.mark.parametrize("rule", ["SGD", 1, ["sgd"]])
def test_bad_rules(rule):
    with pytest.raises(ValueError, match="rule must be one of adam, sgd, lion"):
        convert(torch_sgd(), "headroom", rule=rule)


@pytest.mark.parametrize(
    "make, options",
    [
        (torch.optim.Adamax, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_others_with_moments_of_these_names_are_refused(make, options):
    shapes = [(80, 64)]
    _, optimizer = run(ps := parameters(shapes=shapes), make(ps, lr=LR, **options))
    with pytest.raises(ValueError, match="no known library has states with the keys"):
        convert(optimizer, "headroom")
    wrong = torch_sgd()
    with pytest.raises(ValueError, match="has moments .'momentum_buffer'.*wanted .'exp_avg',."):
        convert(wrong, "headroom", rule="lion")
