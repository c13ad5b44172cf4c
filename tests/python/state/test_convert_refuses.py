"""convert_state: states and arguments that are refused."""

import copy
import math

import pytest
import torch

from helpers.conversions import (
    ADAMW,
    ADAMW8BIT,
    LR,
    assert_same_entries,
    convert,
    old_bitsandbytes,
    parameters,
    run,
)


def without(name, index=0):
    def change(state):
        del state["state"][index][name]

    return change


def with_value(name, value):
    def change(state):
        state["state"][1][name] = value

    return change


BAD = [
    ("headroom-8bit", "nowhere", None, "there is no 'nowhere'; the libraries are headroom"),
    ("headroom", "flashoptim", None, "there is no 'flashoptim'"),
    ("headroom-8bit", "torch", without("step"), "parameter 0 has no 'step'"),
    (
        "headroom-8bit",
        "torch",
        without("exp_avg_absmax"),
        "parameter 0 has an 'exp_avg' of torch.uint8, without scales",
    ),
    ("headroom", "torch", without("exp_avg", 2), "parameter 2 has moments ['exp_avg_sq']"),
    ("headroom", "torch", with_value("exp_avg", torch.zeros(3)), "of shapes [(3,), (70, 60)]"),
    ("headroom-8bit", "torch", with_value("exp_avg_absmax", torch.zeros(3)), "has 3 scales"),
    ("bitsandbytes-8bit", "torch", without("step"), "parameter 0 has no 'step'"),
    ("headroom", "torch", with_value("step", torch.tensor(-1.0)), "parameter 1 has a step of -1.0"),
    ("headroom", "torch", with_value("step", 1e300), "a step of 1e+300, wanted a whole number"),
    ("headroom", "torch", with_value("step", 2.5), "a step of 2.5, wanted a whole number"),
    ("headroom", "torch", with_value("step", math.nan), "a step of nan, wanted a whole number"),
    ("headroom", "torch", with_value("step", True), "a step of True, wanted a number"),
    ("headroom", "torch", with_value("step", torch.ones(2)), "parameter 1 a Tensor"),
    ("headroom", "torch", with_value("exp_avg", "x"), "an 'exp_avg' of str, without scales"),
    ("headroom", "torch", with_value("exp_avg_sq", torch.full((70, 60), -1.0)), "with negative"),
    ("headroom", "torch", with_value("exp_avg_sq", torch.full((70, 60), math.nan)), "or NaN"),
    ("headroom", "headroom-8bit", with_value("exp_avg", torch.full((70, 60), math.inf)), "8 bits"),
    ("headroom-8bit", "torch", with_value("exp_avg_absmax", torch.full((17,), math.nan)), "scales"),
    ("headroom-8bit", "torch", lambda s: s["param_groups"][0].update(block_size=0), "blocks of 0"),
    ("headroom", "torch", lambda s: s["param_groups"][0].pop("lr"), "group 0 has no 'lr'"),
    ("headroom", "torch", lambda s: s["param_groups"][0].update(lr=math.nan), "an lr of nan"),
    ("headroom", "torch", lambda s: s["param_groups"][0].pop("params"), "with a list 'params'"),
    ("headroom", "torch", lambda s: s["param_groups"].append(3), "group 1 must be a dict"),
    ("headroom", "torch", lambda s: s["param_groups"][0]["params"].append(0), "0 is in the groups"),
    ("headroom", "torch", lambda s: s["state"].update({9: {"step": 1}}), "a state of 9"),
    ("headroom", "torch", lambda s: s.pop("param_groups"), "'state' and 'param_groups'"),
]


@pytest.mark.parametrize("name, to, change, message", BAD)
def test_bad_states_are_named_and_left_as_they_are(name, to, change, message):
    _, optimizer = run(ps := parameters(), ADAMW8BIT(ps) if "8bit" in name else ADAMW(ps))
    state = convert(optimizer, name).state_dict
    if change:
        change(state)
    before = copy.deepcopy(state)
    with pytest.raises(ValueError) as error:
        convert(state, to)
    assert message in str(error.value)
    assert state.keys() == before.keys()
    assert_same_entries(state, before)


def test_other_bad_inputs():
    _, optimizer = run(ps := parameters(), ADAMW(ps))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="block_size must be one of"):
        convert(state, "headroom-8bit", block_size=100)
    for wrong in ("256", 256.0, torch.tensor(256), [256]):
        with pytest.raises(ValueError, match="block_size must be one of"):
            convert(state, "headroom-8bit", block_size=wrong)
    for wrong in (-1, 0.5, None):
        with pytest.raises(ValueError, match="min_8bit_size must be a number of elements"):
            convert(state, "headroom-8bit", min_8bit_size=wrong)
    for wrong in ("bfloat16", torch.int8):
        with pytest.raises(ValueError, match="param_dtype must be a floating-point dtype"):
            convert(state, "torch", param_dtype=wrong)
    for wrong in (None, [], 3, {"state": {}, "param_groups": None}):
        with pytest.raises(ValueError, match="'state'"):
            convert(wrong, "torch")
    with pytest.raises(ValueError, match="parameter 1 is a int, not a dict"):
        convert(state | {"state": state["state"] | {1: 7}}, "torch")
    for wrong in (["torch"], None, {}):
        with pytest.raises(ValueError, match="there is no .*; the libraries are"):
            convert(state, wrong)
    with pytest.raises(ValueError, match="there is no 'x'"):
        convert(state, "torch", from_="x")
    _, adafactor = run(parameters(), torch.optim.Adafactor(parameters()))
    with pytest.raises(ValueError, match="states of Adafactor are not converted"):
        convert(adafactor, "headroom")
    flash = {0: {"step": 1, "exp_avg::quantized": torch.zeros(3)}}
    with pytest.raises(ValueError, match="no known library.*'exp_avg::quantized', 'step'"):
        convert({"state": flash, "param_groups": [{"params": [0], "lr": LR}]}, "torch")
    lion = old_bitsandbytes(ps, 256)
    del lion["state"][0]["state2"]
    with pytest.raises(ValueError, match="is of another optimizer of bitsandbytes than Adam"):
        convert(lion, "torch")


def test_memory_that_has_been_freed_is_refused():
    """As FSDP frees it. (Reading it, or printing it, ends the process.)"""
    _, optimizer = run(ps := parameters(), ADAMW(ps))
    freed = torch.ones(70, 60)
    counter = freed[0, 0]
    freed.untyped_storage().resize_(0)
    for change in (with_value("exp_avg", freed), with_value("step", counter)):
        state = optimizer.state_dict()
        state["state"] = {key: dict(entry) for key, entry in state["state"].items()}
        change(state)
        with pytest.raises(ValueError, match="parameter 1 has a tensor whose memory has been fr"):
            convert(state, "torch")


def test_an_optimizer_without_states_gives_its_options():
    state, report = convert(torch.optim.AdamW(parameters(), lr=LR), "headroom-8bit")
    assert state["state"] == {} and report.is_lossless
    optimizer = ADAMW8BIT(parameters())
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == LR
