"""What Adam8bit and AdamW8bit hold: states through save and load, in copies, in reports, and after
an error. Resuming at every step is tested in test_resume.py."""

import copy
import re

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.layouts import LAYOUTS
from helpers.optimizers8bit import (
    ADAM8BIT,
    ADAMW8BIT,
    CLASSES,
    LARGE,
    OnLists,
    grads,
    is_8bit,
    mixed,
    run,
    set_grads,
    snapshot,
    start,
    states,
    unchanged,
)
from helpers.optimizers8bit import trained as trained_on
from helpers.roundtrip import through_file, through_pickle, through_save
from helpers.samples import FLOATS

ADAMW = headroom.optim.AdamW
F32 = {"step", "exp_avg", "exp_avg_sq"}


def fresh_like(params, cls=ADAMW8BIT, dtype=None, **options):
    copies = [torch.nn.Parameter(p.detach().to(dtype or p.dtype).clone()) for p in params]
    return copies, cls(copies, **options)


def assert_same_state(left, right):
    assert_same_bits(states(left), states(right))
    for (_, a), (_, b) in zip(left.state.items(), right.state.items()):
        assert a.keys() == b.keys()


def in_order(optimizer):
    """The entries in the order of the parameters."""
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


# ---- Loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_states_are_never_cast(dtype, target, device):
    """Of either kind, by a file or live, into a model of any precision."""
    params, optimizer = run(*mixed(device, dtype=dtype))
    others, loaded = fresh_like(params, dtype=target)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    for mine, its in zip(in_order(loaded), in_order(optimizer)):
        assert mine.keys() == its.keys() and mine["step"] == 3
        assert all(same_bits(mine[name], its[name]) for name in its)
    run(others, loaded, 1)
    assert [is_8bit(loaded, p) for p in others] == [True, False]
    optimizer.load_state_dict(optimizer.state_dict())
    run(params, optimizer, 1)
    if target == dtype:
        assert_same_bits([*params, *states(optimizer)], [*others, *states(loaded)])


def test_the_state_is_described_by_its_keys():
    params, optimizer = run(*mixed())
    state = optimizer.state_dict()["state"]
    large, small = state[0], state[1]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in large.items()} == {
        "exp_avg": (torch.uint8, LARGE),
        "exp_avg_sq": (torch.uint8, LARGE),
        "exp_avg_absmax": (torch.float32, (17,)),  # of 4200 elements
        "exp_avg_sq_absmax": (torch.float32, (17,)),
        "step": (torch.float64, ()),
    }
    assert set(small) == F32


@pytest.mark.parametrize("source", [ADAMW, torch.optim.AdamW], ids=["headroom", "torch"])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=["", "amsgrad"])
def test_a_checkpoint_of_float32_moments_goes_on_in_float32(source, options, device):
    """A state that there is stays what it is: the bits of AdamW. A parameter without a state, as
    one that was frozen, gets 8 bits (and not with amsgrad, which only a checkpoint can bring)."""
    params, optimizer = mixed(device, (LARGE, (5, 3), (80, 60)), cls=source, **options)
    params[2].requires_grad_(False)
    for seed in range(3):
        set_grads(params[:2], seed)
        optimizer.step()
    sides = []
    for cls in (ADAMW8BIT, ADAMW):
        others, loaded = fresh_like(params, cls)
        loaded.load_state_dict(through_file(optimizer.state_dict()))
        set_grads(others, 5)
        loaded.step()
        sides.append((others, in_order(loaded)))
    (ours, mine), (theirs, its) = sides
    assert_same_bits(ours[:2], theirs[:2])
    for left, right in zip(mine[:2], its):
        assert left.keys() == right.keys() and left["step"] == 4
        assert all(same_bits(left[name], right[name]) for name in right)
    assert (mine[2]["exp_avg"].dtype == torch.uint8) == (not options) and mine[2]["step"] == 1


@pytest.mark.parametrize("how", ["min_8bit_size", "optim_bits", "override"])
def test_a_state_of_8_bits_stays_so_whatever_the_options_say(how, device):
    params, optimizer = run(*mixed(device))
    others, loaded = fresh_like(params, min_8bit_size=10**9 if how == "min_8bit_size" else 4096)
    if how == "override":
        loaded.override(others[0], bits=32)
    saved = through_file(optimizer.state_dict())
    saved["param_groups"][0].update(min_8bit_size=10**9, optim_bits=32 if how != "override" else 8)
    loaded.load_state_dict(saved)
    for side in ((params, optimizer), (others, loaded)):
        set_grads(side[0], 5)
        side[1].step()
    assert is_8bit(loaded, others[0])
    assert_same_bits([*params, *states(optimizer)], [*others, *states(loaded)])


def test_options_of_groups_come_with_the_checkpoint(device):
    """But for what holds for the whole optimizer."""
    options = {"block_size": 64, "seed": 3, "code_rounding": "stochastic", "nonfinite": "propagate"}
    params, optimizer = run(*mixed(device, **options))
    others, loaded = fresh_like(params, nonfinite="skip_step")
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    group = loaded.param_groups[0]
    assert {key: group[key] for key in options} == options | {"nonfinite": "skip_step"}
    for side in ((params, optimizer), (others, loaded)):
        set_grads(side[0], 5)
        side[1].step()
    assert_same_bits([*params, *states(optimizer)], [*others, *states(loaded)])
    before = snapshot(loaded)
    others[0].grad[0, 0] = float("nan")
    loaded.step()
    assert unchanged(loaded, before)


def test_adamw8bit_stays_decoupled_whatever_the_checkpoint_says(device):
    params, adam = run(*mixed(device, cls=ADAM8BIT))
    _, adamw = fresh_like(params)
    adamw.load_state_dict(adam.state_dict())
    assert adamw.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("later", [name for name in LAYOUTS if name != "sliced"])
@pytest.mark.parametrize("first", LAYOUTS)
def test_loading_into_another_memory_order(first, later, device):
    """Blocks follow the memory order in which they were made, so codes keep theirs."""
    param = torch.nn.Parameter(LAYOUTS[first](start().to(device)))
    optimizer = trained_on(param, grads())
    other = torch.nn.Parameter(LAYOUTS[later](param.detach().clone()))
    loaded = ADAMW8BIT([other])
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    for grad in grads(3):
        param.grad, other.grad = grad.to(device), grad.to(device)
        optimizer.step()
        loaded.step()
    assert_same_bits([param.detach()], [other.detach()])
    assert_same_state(optimizer, loaded)


@pytest.mark.parametrize("how", ["flat", "strided"])
def test_scales_in_other_forms_are_taken(how, device):
    """In one row, as bitsandbytes has them, and as views of something larger."""
    (param,), optimizer = run(*mixed(device, ((20, 512),)))
    (other,), loaded = fresh_like([param])
    saved = through_file(optimizer.state_dict())
    for name in ("exp_avg_absmax", "exp_avg_sq_absmax"):
        scales = saved["state"][0][name]
        assert scales.shape == (20, 2)
        saved["state"][0][name] = scales.flatten() if how == "flat" else scales.t().contiguous().t()
    loaded.load_state_dict(saved)
    for side in ((param, optimizer), (other, loaded)):
        set_grads(side[:1], 5)
        side[1].step()
    assert_same_bits([param, *states(optimizer)], [other, *states(loaded)])


def test_hooks_of_save_and_load_see_plain_tensors(device):
    _, optimizer = run(*mixed(device))
    seen = []

    def note(_, state):
        seen.append({type(value) for entry in state["state"].values() for value in entry.values()})

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [{torch.Tensor}] * 2


def without(name):
    return lambda entry, group: entry.pop(name)


def replaced(name, change):
    return lambda entry, group: entry.update({name: change(entry[name])})


BAD_STATES = {
    "no scales": (without("exp_avg_absmax"), "parameter 'large' has no 'exp_avg_absmax'"),
    "no codes": (without("exp_avg"), "parameter 'large' has no 'exp_avg'"),
    "no second codes": (without("exp_avg_sq"), "parameter 'large' has no 'exp_avg_sq'"),
    "no step": (without("step"), "parameter 'large' has no 'step'"),
    "too few scales": (
        replaced("exp_avg_sq_absmax", lambda t: t[:-1]),
        r"'exp_avg_sq_absmax' of parameter 'large' is \(16,\), wanted .* \(17,\)",
    ),
    "scales of another block size": (
        lambda entry, group: group.update(block_size=128),
        r"'exp_avg_absmax' of parameter 'large' is \(17,\), wanted .* \(33,\)",
    ),
    "scales of another dtype": (
        replaced("exp_avg_absmax", torch.Tensor.double),
        "'exp_avg_absmax' of parameter 'large' has dtype torch.float64",
    ),
    "a scale that is a number": (
        replaced("exp_avg_absmax", lambda t: 1.0),
        "'exp_avg_absmax' of parameter 'large' is float",
    ),
    "sparse scales": (
        replaced("exp_avg_absmax", torch.Tensor.to_sparse),
        "'exp_avg_absmax' of parameter 'large' is of layout torch.sparse_coo",
    ),
    "codes of another shape": (
        replaced("exp_avg", torch.Tensor.flatten),
        r"'exp_avg' of parameter 'large' is \(4200,\), wanted .* \(70, 60\)",
    ),
    "signed codes": (
        replaced("exp_avg_sq", torch.Tensor.char),
        "'exp_avg_sq' of parameter 'large' has dtype torch.int8, wanted one of .torch.uint8",
    ),
    "one moment of each kind": (
        replaced("exp_avg_sq", torch.Tensor.float),
        "'exp_avg_sq' of parameter 'large' has dtype torch.float32, wanted .*uint8",
    ),
    "one moment of each kind, the other way": (
        replaced("exp_avg", torch.Tensor.float),
        "'exp_avg' of parameter 'large' has dtype torch.float32, wanted .*uint8",
    ),
}


@pytest.mark.parametrize("change, words", BAD_STATES.values(), ids=BAD_STATES)
def test_a_state_that_does_not_fit_changes_nothing(change, words, device):
    params, _ = mixed(device)
    optimizer = ADAMW8BIT([("small", params[1]), ("large", params[0])], lr=1e-2)
    run(params, optimizer)
    before = snapshot(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    groups = copy.deepcopy(saved["param_groups"])
    saved["param_groups"][0]["lr"] = 0.5
    change(saved["state"][1], saved["param_groups"][0])
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert unchanged(optimizer, before) and optimizer.state_dict()["param_groups"] == groups
    run(params, optimizer, 1)
    assert [entry["step"].item() for entry in in_order(optimizer)] == [4, 4]


# ---- Copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_save])
@CLASSES
def test_a_copy_goes_on_alone(cls, duplicate, device):
    """With its options, and with what override() chose, of parameters without a state too."""
    options = {"block_size": 128, "code_rounding": "stochastic", "seed": 9, "max_grad_norm": 1.0}
    params, optimizer = mixed(device, (LARGE, (5, 3), (80, 60), (9,)), cls=cls, **options)
    optimizer.override(params[2], bits=32)
    optimizer.override(params[3], bits=8)
    run(params[:2], optimizer)
    other = duplicate(optimizer)
    assert type(other) is cls and other.defaults == optimizer.defaults
    twins = other.param_groups[0]["params"]
    before = snapshot(optimizer)
    run(twins, other, 2)
    assert unchanged(optimizer, before)
    assert [is_8bit(other, p) for p in twins] == [True, False, False, True]
    run(params, optimizer, 2)
    assert_same_bits([*params, *states(optimizer)], [*twins, *states(other)])
    with pytest.raises(ValueError, match="has a state already"):
        other.override(twins[0], bits=32)


# ---- Reports -------------------------------------------------------------------------------------


def test_memory_before_and_after_the_first_step(device):
    params, optimizer = mixed(device, (LARGE, (5, 3), (80, 60), (0,)))
    for _ in range(2):
        f32, codes = sorted(optimizer.memory(), key=lambda row: row.dtypes)
        assert f32.dtypes == ("float32", "float64") and codes.dtypes[0] == "uint8"
        assert f32.names == ["1 of group 0", "3 of group 0"] and f32.numel == 15
        assert codes.names == ["0 of group 0", "2 of group 0"] and codes.numel == 9000
        assert f32.bytes == {"exp_avg": 60, "exp_avg_sq": 60, "step": 16}
        scales = 4 * (17 + 19)
        assert codes.bytes == {
            "exp_avg": 9000,
            "exp_avg_sq": 9000,
            "exp_avg_absmax": scales,
            "exp_avg_sq_absmax": scales,
            "step": 16,
        }
        assert codes.bytes_per_parameter == sum(codes.bytes.values()) / 9000
        run(params, optimizer, 1)
    held = sum(value.nbytes for value in states(optimizer))
    assert held == sum(sum(row.bytes.values()) for row in optimizer.memory())


@CLASSES
def test_repr(cls):
    params, _ = mixed()
    optimizer = cls([("tall", params[0]), ("wide", params[1])])
    text = repr(optimizer)
    assert text.startswith(f"{cls.__qualname__} (\nParameter Group 0\n")
    assert "    min_8bit_size: 4096\n" in text
    rows = re.findall(r"State in (.*): (.*) bytes for each of (.*) parameters .*\((.*)\)", text)
    assert ("uint8 + float32 + float64", "2.03", "4,200", "'tall'") in rows
    assert ("float32 + float64", "8.53", "15", "'wide'") in rows


# ---- Errors --------------------------------------------------------------------------------------


NAMES = "large", "small", "last", "tail"


def named(device, **options):
    params, _ = mixed(device, (LARGE, (5, 3), (80, 60), (7,)))
    return params, ADAMW8BIT(list(zip(NAMES, params)), **options)


@pytest.mark.parametrize("on_lists", [False, True], ids=["table", "lists"])
@pytest.mark.parametrize("which, name", list(enumerate(NAMES)))
def test_errors_name_the_parameter(which, name, on_lists, device):
    """Whatever its place among those of its kind. The float32 ones come first: if one of the 8-bit
    ones is wrong, they are done, as groups before a failed one are."""
    params, optimizer = named(device)
    run(params, optimizer)
    entry = optimizer.state[params[which]]
    key = "exp_avg_absmax" if "exp_avg_absmax" in entry else "exp_avg_sq"
    entry[key] = torch.zeros(3, device=device)
    set_grads(params, 5)
    with pytest.raises(RuntimeError, match=rf"is parameter '{name}'"):
        if on_lists:
            with OnLists():
                optimizer.step()
        else:
            optimizer.step()
    done = {"small", "tail"} if name in ("large", "last") else set()
    for p, other in zip(params, NAMES):
        assert optimizer.state[p]["step"] == 3 + (other in done)


@pytest.mark.parametrize("nonfinite", ["skip_step", "propagate"])
@pytest.mark.parametrize("which, name", [(0, "large"), (3, "tail")])
def test_dtypes_and_layouts_that_are_refused(which, name, nonfinite, device):
    params, optimizer = named(device, nonfinite=nonfinite)
    run(params, optimizer)
    set_grads(params, 5)
    params[which].grad = params[which].grad.to_sparse()
    with pytest.raises(RuntimeError, match=f"not support sparse gradients, but .* '{name}' has"):
        optimizer.step()
    params[which].grad, params[which].grad_dtype = None, torch.float64
    params[which].grad = torch.ones_like(params[which], dtype=torch.float64)
    with pytest.raises(RuntimeError, match=rf"dtype f64 .* is parameter '{name}'"):
        optimizer.step()


@pytest.mark.parametrize(
    "nonfinite",
    [
        "propagate",
        "skip_step",
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_device_and_dtype_do_not_matter(dtype, nonfinite, device):
    sides = [mixed(device, nonfinite=nonfinite) for _ in range(2)]
    for params, _ in sides:
        set_grads(params, 0)
    for _ in range(2):
        sides[0][1].step()
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        for _ in range(2):
            sides[1][1].step()
    (params, optimizer), (others, other) = sides
    assert_same_bits([*params, *states(optimizer)], [*others, *states(other)])
