"""Copies and pickles of optimizers, what others keep in their states, and their reports."""

import copy

import headroom
import pytest
import torch

from helpers.bad_arguments import shared
from helpers.parameters import parameter, with_grads
from helpers.roundtrip import through_pickle, through_save
from helpers.torch_pairs import NAMES, pair

# --- Copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_save])
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_goes_on_alone(duplicate, name, device):
    optimizer = pair(name)[0]([parameter(6, device=device)], lr=0.1, state_dtype=torch.bfloat16)
    (p,) = optimizer.param_groups[0]["params"]
    with_grads(p)
    optimizer.step()
    other = duplicate(optimizer)
    assert type(other) is type(optimizer) and other.defaults == optimizer.defaults
    (q,) = other.param_groups[0]["params"]
    assert q is not p and torch.equal(p, q)
    grad = torch.randn_like(p)
    p.grad, q.grad = grad, grad.clone()
    other.step()
    assert not torch.equal(p, q) and optimizer.state[p]["step"] == 1
    optimizer.step()
    assert torch.equal(p, q)
    assert other.state[q]["exp_avg"].dtype == torch.bfloat16


def test_repr():
    assert repr(headroom.optim.AdamW([shared])).startswith("AdamW (\nParameter Group 0\n")


# --- What copies keep ----------------------------------------------------------------------------


def public(optimizer):
    return {name for name in optimizer.__dict__ if not name.startswith("_")}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Adafactor"])
def test_copies_keep_all_public_attributes(name, duplicate, device):
    """torch's suite asks for them after deepcopy."""
    params = with_grads(parameter(3, device=device), parameter(2, device=device))
    optimizer = getattr(headroom.optim, name)(params, max_grad_norm=1.0, count_stalled=True)
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    params[1].grad[0] = torch.nan
    optimizer.step()
    other = duplicate(optimizer)
    assert public(other) == public(optimizer) >= {"grad_norm", "measured", "measured_params"}
    assert other.grad_norm.isnan() and other.grad_scale == 2 and other.measured.culprit() == 1
    assert other.measured_params[1] is other.param_groups[0]["params"][1]
    assert other.stalled_fraction() == optimizer.stalled_fraction()
    assert type(other) is type(optimizer)


def test_a_scheduler_does_not_come_along(device):
    """It replaces step() on the optimizer by a function that no pickle can hold."""
    optimizer = headroom.optim.AdamW([parameter(3, device=device)])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" not in through_pickle(optimizer).__dict__


# --- Entries of the state that are no parameter's ------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Adafactor"])
def test_what_others_keep_in_the_state_is_carried_along(name, device, tmp_path):
    """Torch's classes carry it."""
    param = parameter(3, device=device)
    other = parameter(3, device=device)
    made, more = (
        getattr(headroom.optim, name)([p], count_stalled=True) for p in with_grads(param, other)
    )
    made.step()
    made.state["ema_steps"], made.state["ema"] = 7, {"decay": 0.5}
    for duplicate in (copy.deepcopy, through_pickle):
        copied = duplicate(made)
        assert copied.state["ema_steps"] == 7 and copied.state["ema"] == {"decay": 0.5}
    saved = made.state_dict()
    assert saved["state"]["ema_steps"] == 7 and saved["state"]["ema"] == {"decay": 0.5}
    more.load_state_dict(saved)
    assert more.state["ema_steps"] == 7 and more.state[other]["step"] == 1
    headroom.save_state(tmp_path / "state", optimizer=made)
    more.state.clear()
    headroom.load_state(tmp_path / "state", optimizer=more)
    assert more.state["ema_steps"] == 7 and more.state["ema"] == {"decay": 0.5}
    assert more.state[other]["step"] == 1
    made.step()
    assert 0 <= made.stalled_fraction() <= 1
    assert made.memory() and "State in" in repr(made)


# --- Reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Adafactor"])
def test_frozen_and_lazy_parameters_take_no_memory(name, device):
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 100), torch.nn.LazyLinear(5), torch.nn.Linear(5, 3)
    ).to(device)
    model[0].requires_grad_(False)
    optimizer = getattr(headroom.optim, name)(model.parameters())
    assert "State in" in repr(optimizer)
    assert sum(row.numel for row in optimizer.memory()) == 18
    model(torch.randn(2, 100, device=device)).sum().backward()
    with_grads(*model[1:].parameters())
    expected = {row.dtypes: row.bytes for row in optimizer.memory()}
    optimizer.step()
    assert {row.dtypes: row.bytes for row in optimizer.memory()} == expected
    held = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    assert held == sum(sum(row.bytes.values()) for row in optimizer.memory())
    assert sum(row.numel for row in optimizer.memory()) == 18 + 505
    model[1].requires_grad_(False)  # what has a state has it still
    assert sum(row.numel for row in optimizer.memory()) == 18 + 505
