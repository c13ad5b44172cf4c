"""Infinite and NaN gradients of Adam8bit and AdamW8bit: what each choice of `nonfinite` does."""

import headroom
import pytest
import torch

from helpers.optimizer_suite import OnLists
from helpers.optimizers8bit import (
    mixed,
    run,
    set_grads,
    snapshot,
    unchanged,
)

BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("on_lists", [False, True], ids=["table", "lists"])
@pytest.mark.parametrize("where", [0, 1], ids=["in the 8-bit one", "in the small one"])
@pytest.mark.parametrize("value", BAD)
def test_skip_step_moves_nothing(value, where, on_lists, device):
    params, optimizer = run(*mixed(device, nonfinite="skip_step"))
    before = snapshot(optimizer)
    set_grads(params, 9)
    params[where].grad.view(-1)[7] = value
    if on_lists:
        with OnLists():
            optimizer.step()
    else:
        optimizer.step()
    assert unchanged(optimizer, before) and optimizer.state[params[0]]["step"] == 3
    assert optimizer._measured.found_inf == 1 and optimizer._measured.culprit() == where
    set_grads(params, 9)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 4 for p in params)


@pytest.mark.parametrize("where", range(6))
def test_the_culprit_among_groups_of_both_kinds(where, device):
    sizes = 5000, 3, 17, 4096, 8, 6000
    params = [torch.nn.Parameter(torch.randn(n, device=device)) for n in sizes]
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = headroom.optim.AdamW8bit(groups, nonfinite="skip_step")
    for bad in (None, where):
        for k, p in enumerate(params):
            p.grad = torch.full_like(p, torch.inf if k == bad else 1.0)
        optimizer.step()
        assert optimizer._measured.culprit() == bad
        assert optimizer._measured_params[where] is params[where]


@pytest.mark.parametrize("on_lists", [False, True], ids=["table", "lists"])
@pytest.mark.parametrize("value", BAD)
def test_skip_element_leaves_the_element_alone(value, on_lists, device):
    """In both kinds. Others of its block may round otherwise, so their values are not compared."""
    params, optimizer = run(*mixed(device, nonfinite="skip_element"))
    params[0].grad, params[1].grad = torch.randn_like(params[0]), torch.randn_like(params[1])
    for p in params:
        p.grad.view(-1)[7] = value
    before = [p.detach().clone() for p in params]
    small = {k: v.clone() for k, v in optimizer.state[params[1]].items()}
    if on_lists:
        with OnLists():
            optimizer.step()
    else:
        optimizer.step()
    for p, old in zip(params, before):
        same = (p == old).flatten()
        assert same[7] and same.sum() < 0.01 * same.numel() + 2
        assert optimizer.state[p]["step"] == 4
    for name in ("exp_avg", "exp_avg_sq"):
        same = (optimizer.state[params[1]][name] == small[name]).flatten()
        assert same[7] and same.sum() == 1
        assert optimizer.state[params[0]][f"{name}_absmax"].isfinite().all()


def test_propagate_spoils_the_block(device):
    params, optimizer = run(*mixed(device))  # the default
    set_grads(params, 9)
    params[0].grad.view(-1)[300] = float("nan")
    optimizer.step()
    assert params[0].view(-1)[300].isnan() and params[0].isnan().sum() == 1
    assert optimizer.state[params[0]]["exp_avg_absmax"].isnan().flatten().nonzero().tolist() == [
        [1]
    ]
    assert params[1].isfinite().all() and optimizer._measured is None
