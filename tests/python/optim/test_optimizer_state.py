"""Optimizer states through save and load: to and from torch, without casts, or not at all."""

import copy

import headroom
import pytest
import torch

from helpers.bits import bits
from helpers.roundtrip import through_file
from helpers.samples import FLOATS
from helpers.twins import CLOSE, Twins

NAMES = ["Adam", "AdamW"]


def trained(optimizer_class, steps=3, dtype=torch.float32, device="cpu", **options):
    """An optimizer with a past, over two parameters."""
    params = [
        torch.nn.Parameter(torch.randn(s, device=device, dtype=dtype)) for s in ((3, 4), (5,))
    ]
    optimizer = optimizer_class(params, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def states(optimizer):
    return [optimizer.state[p] for p in parameters(optimizer)]


def frozen_bits(optimizer):
    """Everything the optimizer holds, to be compared later."""
    tensors = [*parameters(optimizer), *(t for entry in states(optimizer) for t in entry.values())]
    return [(t.dtype, bits(t).clone()) for t in tensors]


def equal_bits(left, right):
    return len(left) == len(right) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(left, right)
    )


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


# --- Bad states ----------------------------------------------------------------------------------


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


# --- Bad values and options ----------------------------------------------------------------------


def element(key, value):
    def edit(saved):
        saved["state"][0][key].view(-1)[-1] = value

    return edit


def option(name, value):
    return lambda saved: saved["param_groups"][0].update({name: value})


def no_option(name):
    return lambda saved: saved["param_groups"][0].pop(name)


NAN, INF = float("nan"), float("inf")
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
