"""States that an optimizer refuses to load, which then changes nothing, and the odd ones that it
takes."""

import copy

import headroom
import pytest
import torch

from helpers.optimizer_states import equal_bits, frozen_bits, parameters, states, trained

NAN, INF = float("nan"), float("inf")


def with_entry(change):
    """Changes the entry of the last parameter, after the first has been accepted."""

    def edit(saved):
        change(saved["state"][1])

    return edit


def wrong_shape(entry):
    entry["exp_avg"] = entry["exp_avg"][:3]


def broadcastable(entry):
    entry["exp_avg_sq"] = entry["exp_avg_sq"][:1]


def missing_moment(entry):
    del entry["exp_avg_sq"]


def missing_step(entry):
    del entry["step"]


def moment_a_number(entry):
    entry["exp_avg"] = 0.5


def moment_of_integers(entry):
    entry["exp_avg"] = entry["exp_avg"].long()


def negative_step(entry):
    entry["step"] = torch.tensor(-1.0)


def step_nan(entry):
    entry["step"] = float("nan")


def steps_for_each_element(entry):
    entry["step"] = torch.ones(5)


def missing_group(saved):
    saved["param_groups"] = []


def more_parameters(saved):
    saved["param_groups"][0]["params"].append(2)


def fewer_parameters(saved):
    saved["param_groups"][0]["params"].pop()


BAD_STATES = {
    wrong_shape: (ValueError, r"'exp_avg' of parameter 1 of group 0 is \(3,\), wanted .*\(5,\)"),
    broadcastable: (ValueError, r"'exp_avg_sq' of parameter 1 .* \(1,\)"),
    missing_moment: (ValueError, r"parameter 1 of group 0 has no 'exp_avg_sq'"),
    missing_step: (ValueError, r"parameter 1 of group 0 has no 'step'"),
    moment_a_number: (ValueError, r"'exp_avg' of parameter 1 .* float"),
    moment_of_integers: (ValueError, r"'exp_avg' of parameter 1 .* torch.int64"),
    negative_step: (ValueError, r"'step' of parameter 1 .* -1"),
    step_nan: (ValueError, r"'step' of parameter 1 .* nan"),
    steps_for_each_element: (ValueError, r"'step' of parameter 1 .* 5 elements"),
    missing_group: (ValueError, "different number of parameter groups"),
    more_parameters: (ValueError, "doesn't match the size"),
    fewer_parameters: (ValueError, "doesn't match the size"),
}


@pytest.mark.parametrize("edit", BAD_STATES, ids=lambda edit: edit.__name__)
def test_a_state_that_does_not_fit_changes_nothing(edit, device):
    error, words = BAD_STATES[edit]
    optimizer = trained(headroom.optim.AdamW, device=device)
    saved = copy.deepcopy(optimizer.state_dict())
    whole = (missing_group, more_parameters, fewer_parameters)
    (edit if edit in whole else with_entry(edit))(saved)
    saved["param_groups"] and saved["param_groups"][0].update(lr=0.5)
    before, groups = frozen_bits(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(saved)
    assert equal_bits(before, frozen_bits(optimizer))
    assert optimizer.state_dict()["param_groups"] == groups
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    for p in parameters(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [entry["step"].item() for entry in states(optimizer)] == [4, 4]


# --- Bad values and options ----------------------------------------------------------------------


def element(key, value):
    def edit(saved):
        saved["state"][0][key].view(-1)[-1] = value

    return edit


def option(name, value):
    return lambda saved: saved["param_groups"][0].update({name: value})


def no_option(name):
    return lambda saved: saved["param_groups"][0].pop(name)


SECOND = r"'{}' of parameter 0 of group 0 has 1 elements such as {}, wanted 0 or more"
ADAM_OPTIONS = [
    (option("lr", None), TypeError, r"param_groups\[0\] of the loaded state: lr must be"),
    (
        option("lr", NAN),
        ValueError,
        r"param_groups\[0\] of the loaded state: Invalid learning rate",
    ),
    (option("betas", (0.9,)), ValueError, "betas must be two numbers"),
    (option("betas", "ab"), ValueError, "betas must be two numbers"),
    (option("eps", None), TypeError, "eps must be a number"),
    (option("weight_decay", "0.1"), TypeError, "weight_decay must be a number"),
    (option("weight_decay", -1.0), ValueError, "weight_decay"),
    (no_option("lr"), ValueError, r"param_groups\[0\] of the loaded state has no 'lr'"),
    (no_option("eps"), ValueError, "has no 'eps'"),
    (no_option("betas"), ValueError, "has no 'betas'"),
    (option("amsgrad", "yes"), TypeError, "has amsgrad='yes', wanted True or False"),
    (option("rounding", 3), TypeError, "has rounding of type int, wanted a string or None"),
    (option("state_dtype", "float7"), ValueError, "state_dtype must be one of .* got 'float7'"),
]
ADAMW = (headroom.optim.AdamW, {"amsgrad": True})
EIGHT = (headroom.optim.AdamW8bit, {"min_8bit_size": 0})
TORCH = (headroom.optim.Adafactor, {})
HF = (headroom.optim.Adafactor, {"semantics": "hf"})
SPOILED = [
    *((ADAMW, *case) for case in ADAM_OPTIONS),
    (ADAMW, element("exp_avg_sq", -1.0), ValueError, SECOND.format("exp_avg_sq", "-1")),
    (ADAMW, element("max_exp_avg_sq", -INF), ValueError, SECOND.format("max_exp_avg_sq", "-inf")),
    (EIGHT, element("exp_avg_absmax", NAN), ValueError, SECOND.format("exp_avg_absmax", "nan")),
    (EIGHT, element("exp_avg_absmax", -1.0), ValueError, SECOND.format("exp_avg_absmax", "-1")),
    (EIGHT, element("exp_avg_sq_absmax", INF), ValueError, "such as inf, wanted .* and finite"),
    (EIGHT, element("exp_avg_sq_absmax", -2.0), ValueError, "such as -2"),
    (EIGHT, option("block_size", 100), ValueError, "block_size must be one of"),
    (EIGHT, option("block_size", 256.0), ValueError, "block_size must be one of"),
    (EIGHT, option("min_8bit_size", "a"), TypeError, "min_8bit_size must be a number"),
    (EIGHT, option("optim_bits", 4), ValueError, "optim_bits must be 8 or 32"),
    (TORCH, element("row_var", -1.0), ValueError, SECOND.format("row_var", "-1")),
    (TORCH, element("col_var", -1.0), ValueError, SECOND.format("col_var", "-1")),
    (HF, element("exp_avg_sq_row", -1.0), ValueError, SECOND.format("exp_avg_sq_row", "-1")),
    (HF, element("RMS", -1.0), ValueError, SECOND.format("RMS", "-1")),
    (TORCH, option("lr", None), ValueError, r"param_groups\[0\] of the loaded state: lr is None"),
    (TORCH, option("eps", 1e-3), ValueError, "eps must be two numbers, got 0.001"),
    (TORCH, option("d", "1"), TypeError, "d must be a number"),
    (TORCH, no_option("lr"), ValueError, "has no 'lr'"),
    (TORCH, no_option("d"), ValueError, "has no 'd'"),
    (HF, option("lr", 1e-3), ValueError, "Cannot combine manual"),
    (HF, option("decay_rate", None), TypeError, "decay_rate must be a number"),
    (HF, no_option("eps"), ValueError, "has no 'eps'"),
]


@pytest.mark.parametrize("made, edit, error, words", SPOILED)
def test_values_and_options_that_no_step_could_use_are_refused(made, edit, error, words, device):
    cls, options = made
    optimizer = trained(cls, device=device, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    edit(saved)
    before, groups = frozen_bits(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(saved)
    assert equal_bits(before, frozen_bits(optimizer))
    assert optimizer.state_dict()["param_groups"] == groups


def test_values_that_a_run_can_have_load(device):
    """Zeros of both signs, and a NaN that a gradient brought, which torch loads as well."""
    optimizer = trained(headroom.optim.AdamW, device=device)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_sq"].view(-1)[:3] = torch.tensor([0.0, -0.0, NAN])
    saved["state"][0]["exp_avg"].view(-1)[0] = -NAN
    optimizer.load_state_dict(saved)
    assert states(optimizer)[0]["exp_avg_sq"].isnan().sum() == 1


def test_limits_that_differ_between_groups_are_refused():
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2)]
    optimizer = headroom.optim.AdamW(groups, max_grad_norm=1.0)
    saved = optimizer.state_dict()
    saved["param_groups"][1]["max_grad_norm"] = 2.0
    with pytest.raises(ValueError, match=r"group 0 has 1\.0 and group 1 has 2\.0"):
        optimizer.load_state_dict(saved)
