"""Optimizer states through save and load: to and from torch, without casts."""

import copy

import headroom
import pytest
import torch

from helpers.optimizer_states import NAMES, equal_bits, frozen_bits, parameters, states, trained
from helpers.roundtrip import through_file
from helpers.samples import FLOATS
from helpers.twins import CLOSE, Twins

# --- With torch, both ways -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_keys_are_torchs(name, options, device):
    ours = trained(getattr(headroom.optim, name), device=device, **options).state_dict()
    theirs = trained(getattr(torch.optim, name), device=device, **options).state_dict()
    assert ours.keys() == theirs.keys()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for k, entry in theirs["state"].items():
        assert ours["state"][k].keys() == entry.keys()
        assert all(ours["state"][k][key].shape == value.shape for key, value in entry.items())


@pytest.mark.parametrize(
    "to_headroom", [True, False], ids=["torch to headroom", "headroom to torch"]
)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_resumes_the_other(name, options, to_headroom, device):
    """Ten steps by one, saved, ten by the other: as if either had made all twenty."""
    twins = Twins(name=name, device=device, **options).step(10)
    source, target = (
        (twins.other, twins.optimizer) if to_headroom else (twins.optimizer, twins.other)
    )
    fresh = type(target)(parameters(target), lr=0.7, weight_decay=0.9)
    fresh.load_state_dict(through_file(source.state_dict()))
    twins.optimizer, twins.other = (fresh, twins.other) if to_headroom else (twins.optimizer, fresh)
    twins.step(10).check(rtol=20 * 2**-24, atol=20 * 2**-24)
    assert fresh.param_groups[0]["lr"] == 1e-2


def test_a_checkpoint_of_torchs_fused_optimizer(device):
    """Its counters are float32 on the device of the parameters."""
    source = trained(torch.optim.AdamW, fused=True, device=device)
    target = headroom.optim.AdamW(
        [torch.nn.Parameter(p.detach().clone()) for p in parameters(source)]
    )
    target.load_state_dict(through_file(source.state_dict()))
    for optimizer in (source, target):
        for p in parameters(optimizer):
            p.grad = torch.ones_like(p)
        optimizer.step()
    for a, b in zip(parameters(source), parameters(target)):
        torch.testing.assert_close(a, b, **CLOSE)
    assert all(entry["step"].dtype == torch.float64 for entry in states(target))


def test_old_checkpoints(device):
    """Counters were numbers, and groups lacked options that came later."""
    optimizer = trained(headroom.optim.AdamW, device=device)
    old = optimizer.state_dict()
    for entry in old["state"].values():
        entry["step"] = int(entry["step"])
    for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad"):
        del old["param_groups"][0][key]
    optimizer.load_state_dict(old)
    for p in parameters(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [entry["step"].item() for entry in states(optimizer)] == [4, 4]


def test_adamw_stays_decoupled_whatever_the_checkpoint_says(device):
    adam = trained(headroom.optim.Adam, device=device)
    adamw = headroom.optim.AdamW(parameters(adam))
    adamw.load_state_dict(adam.state_dict())
    assert adamw.param_groups[0]["decoupled_weight_decay"] is True


# --- Nothing is cast -----------------------------------------------------------------------------


MIXES = [(p, s) for p in FLOATS for s in FLOATS if p != s]


@pytest.mark.parametrize("param, state", MIXES, ids=str)
def test_states_keep_their_dtype(param, state, device):
    source = trained(headroom.optim.AdamW, dtype=param, device=device, state_dtype=state)
    target = headroom.optim.AdamW(parameters(source), state_dtype=state)
    target.load_state_dict(through_file(source.state_dict()))
    assert equal_bits(frozen_bits(source), frozen_bits(target))
    assert states(target)[0]["exp_avg"].dtype == state


def test_torch_casts_states_to_the_dtype_of_the_parameter():
    """What the override of the loader is for: torch rounds float32 moments to 8 bits here."""
    source = trained(headroom.optim.AdamW, dtype=torch.bfloat16, state_dtype=torch.float32)
    kept, cast = (of(parameters(source)) for of in (headroom.optim.AdamW, torch.optim.AdamW))
    for optimizer in (kept, cast):
        optimizer.load_state_dict(source.state_dict())
    before = states(source)[0]["exp_avg"]
    assert torch.equal(states(kept)[0]["exp_avg"], before)
    assert states(cast)[0]["exp_avg"].dtype == torch.bfloat16
    assert not torch.equal(states(cast)[0]["exp_avg"].float(), before)


def test_state_dtype_outlives_a_checkpoint_of_torch(device):
    """States that are made after loading still have the dtype that was asked for."""
    source = trained(torch.optim.AdamW, device=device)
    later = torch.nn.Parameter(torch.ones(2, device=device))
    source.add_param_group({"params": [later]})
    target = headroom.optim.AdamW(
        [{"params": g["params"]} for g in source.param_groups], state_dtype=torch.bfloat16
    )
    target.load_state_dict(source.state_dict())
    later.grad = torch.ones_like(later)
    target.step()
    assert target.state[later]["exp_avg"].dtype == torch.bfloat16
    assert states(target)[0]["exp_avg"].dtype == torch.float32


def test_live_state_loads_without_loss(device):
    """Accelerate does this in prepare()."""
    optimizer = trained(headroom.optim.AdamW, device=device, state_dtype=torch.bfloat16)
    before = frozen_bits(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert equal_bits(before, frozen_bits(optimizer))


def test_the_state_follows_the_parameter_to_its_device_and_memory_order(device):
    source = trained(headroom.optim.AdamW)
    turned = [
        torch.nn.Parameter(
            p.detach().to(device).t().contiguous().t() if p.dim() == 2 else p.detach().to(device)
        )
        for p in parameters(source)
    ]
    target = headroom.optim.AdamW(turned)
    target.load_state_dict(through_file(source.state_dict()))
    for p, entry in zip(turned, states(target)):
        for key, value in entry.items():
            assert value.device == p.device
            assert key == "step" or value.stride() == p.stride()
    for optimizer in (source, target):
        for p in parameters(optimizer):
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    assert parameters(source)[0].stride() != turned[0].stride()
    for p, q in zip(parameters(source), turned):
        assert torch.equal(p, q.cpu())


def test_a_saved_state_is_a_plain_dict():
    """Tensors, numbers and strings only, equal each time it is asked for."""
    optimizer = trained(headroom.optim.AdamW)
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert first["param_groups"] == second["param_groups"]
    assert {type(v) for entry in first["state"].values() for v in entry.values()} == {torch.Tensor}
    assert through_file(first)["param_groups"] == first["param_groups"]


# --- Hooks ---------------------------------------------------------------------------------------


def kinds(state):
    return {type(value) for entry in state.values() for value in entry.values()}


def test_hooks_of_save_and_load_see_plain_tensors(device):
    optimizer, seen = trained(headroom.optim.AdamW, device=device), []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before save"))
    optimizer.register_state_dict_post_hook(
        lambda o, state: seen.append(("after save", kinds(state["state"])))
    )
    optimizer.register_load_state_dict_pre_hook(
        lambda o, state: seen.append(("before load", kinds(state["state"])))
    )
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(("after load", kinds(o.state)))
    )
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    plain = {torch.Tensor}
    once = ["before save", *((when, plain) for when in ("after save", "before load", "after load"))]
    assert seen == 2 * once


def test_a_hook_may_replace_what_is_loaded(device):
    optimizer = trained(headroom.optim.AdamW, device=device)

    def double(_, state):
        entries = {k: e | {"exp_avg": e["exp_avg"] * 2} for k, e in state["state"].items()}
        return state | {"state": entries}

    optimizer.register_load_state_dict_pre_hook(double)
    before = [entry["exp_avg"].clone() for entry in states(optimizer)]
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(e["exp_avg"], 2 * b) for e, b in zip(states(optimizer), before))


def test_loading_leaves_the_dict_alone(device):
    optimizer = trained(headroom.optim.AdamW, device=device)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert saved.keys() == kept.keys() and saved["param_groups"] == kept["param_groups"]
    for k, entry in kept["state"].items():
        assert saved["state"][k].keys() == entry.keys()
        assert all(torch.equal(saved["state"][k][key], value) for key, value in entry.items())


def test_a_missing_entry_starts_anew_as_in_torch(device):
    """A parameter that had no gradient when the state was saved has no entry."""
    optimizer = trained(headroom.optim.AdamW, device=device)
    saved = optimizer.state_dict()
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    for p in parameters(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [entry["step"].item() for entry in states(optimizer)] == [4, 1]


def test_keys_of_others_are_carried_along(device):
    optimizer = trained(headroom.optim.AdamW, device=device)
    saved = optimizer.state_dict()
    saved["state"][0]["note"] = torch.arange(3)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state_dict()["state"][0]["note"], torch.arange(3))
