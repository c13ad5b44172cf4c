"""What Adam8bit and AdamW8bit hold: states through save and load, in copies, in reports, and after
an error. Resuming at every step is tested in test_resume.py."""

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.optimizer_suite import OnLists
from helpers.optimizers8bit import (
    ADAMW8BIT,
    LARGE,
    is_8bit,
    mixed,
    run,
    set_grads,
    snapshot,
    states,
    unchanged,
)
from helpers.roundtrip import through_file

ADAMW = headroom.optim.AdamW
F32 = {"step", "exp_avg", "exp_avg_sq"}


def fresh_like(params, cls=ADAMW8BIT, dtype=None, **options):
    copies = [torch.nn.Parameter(p.detach().to(dtype or p.dtype).clone()) for p in params]
    return copies, cls(copies, **options)


def in_order(optimizer):
    """The entries in the order of the parameters."""
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


# ---- Loading -------------------------------------------------------------------------------------


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


# ---- Copies --------------------------------------------------------------------------------------


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
