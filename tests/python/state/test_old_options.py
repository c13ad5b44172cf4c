"""Optimizer states of Headroom 0.1.0: the option ``code_rounding`` was ``stochastic_rounding``."""

import copy

import headroom
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from helpers.bits import assert_same_bits
from helpers.modes import entries

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROUNDINGS = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
FLATTEN = pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])


def made(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 50)
    return model, headroom.optim.AdamW8bit(model.parameters(), lr=1e-2, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 400).view(4, 100)).square().mean().backward()
    optimizer.step()


def renamed(name):
    return name.replace("code_rounding", "stochastic_rounding")


def as_of_old(state):
    """A state dict, nested or flattened, with the option that 0.1.0 had, and no other."""
    if "param_groups" in state:
        groups = [as_of_old(group) for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}
    return {
        renamed(key): value == "stochastic" if key.endswith("code_rounding") else value
        for key, value in state.items()
    }


def assert_same_states(left, right):
    for a, b in zip(entries(left), entries(right)):
        assert a.keys() == b.keys()
        assert_same_bits(a.values(), [b[name] for name in a])


def assert_resumed(loaded, reference):
    """With the option that was saved: the next steps have the same bits."""
    for model, optimizer in (loaded, reference):
        step(model, optimizer)
    (group,) = loaded[1].param_groups
    assert group["code_rounding"] == reference[1].param_groups[0]["code_rounding"]
    assert "stochastic_rounding" not in group
    assert_same_states(loaded[1], reference[1])
    assert_same_bits(loaded[0].parameters(), reference[0].parameters())


@ROUNDINGS
def test_a_state_dict_loads(rounding):
    model, optimizer = made(code_rounding=rounding, seed=5)
    step(model, optimizer)
    state = copy.deepcopy(as_of_old(optimizer.state_dict()))
    kept = copy.deepcopy(state["param_groups"])
    other, loaded = made()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(state)
    assert state["param_groups"] == kept
    assert_resumed((other, loaded), (model, optimizer))


@FLATTEN
@ROUNDINGS
def test_load_sharded_takes_the_option_of_a_distributed_checkpoint(rounding, flatten, tmp_path):
    model, optimizer = made(code_rounding=rounding, seed=5)
    step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = as_of_old(get_optimizer_state_dict(model, optimizer, options=options))
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, loaded = made()
    other.load_state_dict(model.state_dict())
    headroom.state.load_sharded(tmp_path, other, loaded)
    assert_resumed((other, loaded), (model, optimizer))


def test_a_state_dict_that_was_gathered_is_for_torchs_loader():
    model, optimizer = made()
    with pytest.raises(TypeError, match=r"got a state dict; set_optimizer_state_dict\(\)"):
        headroom.state.load_sharded(optimizer.state_dict(), model, optimizer)


@FLATTEN
def test_the_loader_of_torch_refuses_the_checkpoint_or_passes_over_the_option(flatten, tmp_path):
    """Which is why load_sharded is the way that is documented."""
    model, optimizer = made(code_rounding="stochastic")
    step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = as_of_old(get_optimizer_state_dict(model, optimizer, options=options))
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, loaded = made()
    target = {"optimizer": get_optimizer_state_dict(other, loaded, options=options)}
    with pytest.raises(dcp.api.CheckpointException, match="code_rounding"):
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    set_optimizer_state_dict(other, loaded, target["optimizer"], options=options)
    assert loaded.param_groups[0]["code_rounding"] == "nearest"
    assert_same_states(loaded, optimizer)
