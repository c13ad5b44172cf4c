"""What every optimizer holds: through save and load, from the original and to it, without casts; in
copies; in reports; and states that do not fit, which change nothing."""

import copy

import pytest
import torch
from headroom.optim import Adafactor, Adam, AdamW, AdamW8bit, Lion, Lion8bit

from helpers.bits import assert_same_bits
from helpers.layouts import LAYOUTS, transposed
from helpers.optimizer_suite import (
    CLOSE,
    EACH,
    ROWS,
    WITH_CODES,
    assert_frozen,
    entries,
    everything,
    frozen,
    named,
    options_of,
    parameters,
    rows,
    run,
    start,
    trained,
)
from helpers.roundtrip import through_file, through_pickle, through_save
from helpers.samples import FLOATS

INF, NAN = float("inf"), float("nan")
ADAMW, EIGHT = named(AdamW), named(AdamW8bit)
WITH_ORIGINAL = rows(lambda row: row.theirs)


def copies(params, dtype=None):
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def loaded(row, saved, params, **options):
    """Returns copies of parameters, and an optimizer of other options with a state from a file."""
    others = copies(params)
    optimizer = row.make(others, **options)
    optimizer.load_state_dict(through_file(saved))
    return others, optimizer


def original(row, params):
    ours = ("semantics", "workspace", "min_8bit_size")
    return row.theirs(params, **{k: v for k, v in row.options.items() if k not in ours})


# ---- Loading -------------------------------------------------------------------------------------


@WITH_ORIGINAL
def test_the_original_and_ours_resume_each_other(row, device):
    """From before the first step too. Codes are not numbers, so the original takes none; what it
    brings goes on in float32, with the bits of the class that has no codes."""
    params = start(row, device=device)
    theirs = original(row, params)
    for first in (0, 3):
        run(params, theirs, range(first))
        others, ours = loaded(row, theirs.state_dict(), params, lr=0.7)
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        if first and row.wide:
            wide = row._replace(cls=row.wide, options={})
            more, float32 = loaded(wide, theirs.state_dict(), params)
            for each in ((others, ours), (more, float32)):
                run(*each, range(3, 6))
            assert_same_bits(everything(ours), everything(float32))
    run(params, theirs, range(3, 6))
    ours.zero_grad()
    if row.wide:
        return
    run(others, ours, range(3, 6))
    back = original(row, copies(others))
    back.load_state_dict(through_file(ours.state_dict()))
    run(parameters(back), back, range(6, 9))
    run(params, theirs, range(6, 9))
    near = {"rtol": 0, "atol": 4e-3} if "Muon" in row.name else {"rtol": 1e-5, "atol": 1e-6}
    for p, q in zip(params, parameters(back)):
        torch.testing.assert_close(p, q, **near)
    ours, theirs = entries(ours), entries(theirs)
    for mine, its in zip(ours, theirs):
        assert its.keys() <= mine.keys() <= its.keys() | {"step"}
        for key, value in its.items():
            assert mine[key].shape == torch.as_tensor(value).shape


def test_a_checkpoint_of_torchs_fused_optimizer(device):
    """Its counters are float32 on the device of the parameters. Old ones were numbers, and groups
    lacked options that came later."""
    params = start(ADAMW, device=device)
    source = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)
    run(params, source, range(3))
    saved = copy.deepcopy(source.state_dict())
    for old in (False, True):
        if old:
            for entry in saved["state"].values():
                entry["step"] = int(entry["step"])
            for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad"):
                del saved["param_groups"][0][key]
        others, target = loaded(ADAMW, saved, params)
        before = copies(params)
        run(others, target, [3])
        reference = torch.optim.AdamW(before, lr=1e-2, weight_decay=0.1)
        reference.load_state_dict(copy.deepcopy(source.state_dict()))
        run(before, reference, [3])
        for a, b in zip(others, before):
            torch.testing.assert_close(a, b, **CLOSE)
        steps = [entry["step"] for entry in entries(target)]
        assert all(step.dtype == torch.float64 and step == 4 for step in steps)


@rows(lambda row: "state_dtype" in row.arguments or row.wide or not row.by_element)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_states_are_never_cast(row, dtype, device):
    """By a file or live, into a model of any precision: torch's loader rounds them to it."""
    for state in FLOATS if "state_dtype" in row.arguments else [None]:
        own = {} if state is None else {"state_dtype": state}
        params, optimizer = trained(row, dtype=dtype, device=device, **own)
        optimizer.load_state_dict(optimizer.state_dict())
        for target in FLOATS:
            others = copies(params, target)
            other = row.make(others, **own)
            other.load_state_dict(through_file(optimizer.state_dict()))
            for mine, its in zip(entries(other), entries(optimizer)):
                assert mine.keys() == its.keys()
                assert_same_bits(mine.values(), its.values())
            run(others, other, [5])
            if target == dtype:
                alike = run(*copy.deepcopy((params, optimizer)), [5])
                assert_same_bits(everything(alike[1]), everything(other))
        moments = {v.dtype for v in entries(optimizer)[0].values() if v.shape == params[0].shape}
        assert moments <= {state, torch.uint8, torch.float32}


def test_torch_casts_states_to_the_dtype_of_the_parameter():
    """What the override of the loader is for: torch rounds float32 moments to 8 bits here. And a
    dtype that was asked for outlives a checkpoint of torch, for states that are made later."""
    params, source = trained(ADAMW, dtype=torch.bfloat16, state_dtype=torch.float32)
    kept, cast = (of(params) for of in (AdamW, torch.optim.AdamW))
    for optimizer in (kept, cast):
        optimizer.load_state_dict(source.state_dict())
    before = entries(source)[0]["exp_avg"]
    assert torch.equal(entries(kept)[0]["exp_avg"], before)
    assert entries(cast)[0]["exp_avg"].dtype == torch.bfloat16
    late = torch.nn.Parameter(torch.ones(2))
    wide = torch.optim.AdamW(start(ADAMW)[:2])
    run(parameters(wide), wide, range(1))
    wide.add_param_group({"params": [late]})
    target = AdamW([{"params": g["params"]} for g in wide.param_groups], state_dtype=torch.bfloat16)
    target.load_state_dict(wide.state_dict())
    run(parameters(target), target, [1])
    dtypes = [entry["exp_avg"].dtype for entry in entries(target)]
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16]


@EACH
def test_a_state_goes_to_the_device_and_memory_order_of_its_parameter(row, device):
    """But for codes, whose blocks follow the memory order in which they were made."""
    params, source = trained(row)
    others = [torch.nn.Parameter(transposed(p.detach().to(device))) for p in params]
    target = row.make(others)
    target.load_state_dict(through_file(source.state_dict()))
    for p, entry in zip(others, entries(target)):
        for value in entry.values():
            assert value.device == p.device
            if value.shape == p.shape and p.dim() == 2 and value.dtype != torch.uint8:
                assert value.stride() == p.stride()
    run(params, source, [5])
    run(others, target, [5])
    for p, q in zip(params, others):
        assert torch.equal(p, q.cpu()) or row.name.startswith("Muon")


@WITH_CODES
def test_codes_in_every_memory_order(row, device):
    """Loaded into a parameter that lies otherwise, and with scales in one row, as bitsandbytes has
    them, or as views of something larger."""
    shape = [(24, 16, 5, 5)] if row.by_element else [(24, 40)]
    options = {"block_size": 64}
    names = LAYOUTS if row.by_element else ("contiguous", "transposed")
    for first in (LAYOUTS[name] for name in names):
        (value,) = start(row, device=device, shapes=shape)
        param = torch.nn.Parameter(first(value.detach()))
        optimizer = row.make([param], **options)
        run([param], optimizer, range(3))
        saved = optimizer.state_dict()
        for name in (name for name in names if name != "sliced"):
            other = torch.nn.Parameter(LAYOUTS[name](param.detach().clone()))
            again = row.make([other])
            state = through_file(saved)
            for key in [key for key in state["state"][0] if key.endswith("absmax")]:
                scales = state["state"][0][key]
                forms = {"contiguous": scales.t().contiguous().t() if scales.dim() == 2 else scales}
                state["state"][0][key] = forms.get(name, scales.flatten())
            again.load_state_dict(state)
            kept = copy.deepcopy((param, optimizer))
            run([kept[0]], kept[1], [7, 8])
            run([other], again, [7, 8])
            assert_same_bits(everything(again), everything(kept[1]))


@EACH
def test_loading_and_saving_leave_what_is_given_alone(row, device):
    """The dict, its tensors and what is made of them are apart. States are tensors in a plain dict,
    which hooks see and may replace. Keys of others are carried along, in the state of a parameter
    and beside it; a parameter without an entry starts anew, as in torch."""
    params, optimizer = trained(row, device=device)
    saved = copy.deepcopy(optimizer.state_dict())
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]
    assert through_file(saved)["param_groups"] == saved["param_groups"]
    saved["state"][0]["note"] = torch.arange(3)
    saved["state"]["ema"] = {"decay": 0.5}
    saved["state"]["ema_steps"] = 7
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    run(params, optimizer, [5])
    assert saved["param_groups"] == kept["param_groups"]
    assert saved["state"].keys() == kept["state"].keys()
    for k in range(len(params)):
        assert_same_bits(saved["state"][k].values(), kept["state"][k].values())
    found = optimizer.state_dict()["state"]
    assert torch.equal(found[0]["note"], torch.arange(3))
    for one in (optimizer, copy.deepcopy(optimizer), through_pickle(optimizer)):
        assert one.state["ema_steps"] == 7 and one.state["ema"] == {"decay": 0.5}

    seen = []

    def note(when, state):
        owned = [entry for key, entry in state.items() if not isinstance(key, str)]
        seen.append((when, {type(value) for entry in owned for value in entry.values()}))

    def mark(_, state):
        note("before load", state["state"])
        entries = dict(state["state"])
        if 1 in entries:
            entries[1] = entries[1] | {"mark": torch.ones(2)}
        return state | {"state": entries}

    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before save"))
    optimizer.register_state_dict_post_hook(lambda o, state: note("after save", state["state"]))
    optimizer.register_load_state_dict_pre_hook(mark)
    optimizer.register_load_state_dict_post_hook(lambda o: note("after load", o.state))
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    plain = {torch.Tensor}
    once = ["before save", *((w, plain) for w in ("after save", "before load", "after load"))]
    assert seen == 2 * once and (optimizer.state[params[1]]["mark"] == 1).all()
    del kept["state"][1]
    optimizer.load_state_dict(kept)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    run(params, optimizer, [5])
    steps = [entry.get("step", want) for entry, want in zip(entries(optimizer), (4, 1, 4))]
    assert steps == [4, 1, 4]


# ---- States that do not fit ----------------------------------------------------------------------


def spoiled(row, entry):
    """Yields the name of a state, and values of it that no step could use."""
    for name, value in entry.items():
        if name == "step":
            yield from ((name, bad) for bad in (torch.tensor(-1.0), NAN, torch.ones(5), "1"))
            continue
        if name == "RMS":
            yield name, torch.tensor(-1.0)
            continue
        yield name, 0.5
        yield name, value.to_sparse()
        yield name, value.to("meta")
        yield name, value.to(torch.int16)
        if value.dim():
            yield name, value[:-1]
            yield name, value[:1].clone() if len(value) > 1 else value[:0]
        if value.dtype == torch.uint8:
            yield name, value.char()
            if "exp_avg_sq" in entry:  # one moment of each kind
                yield name, value.float()
        elif name not in row.signed:
            bad = (NAN, INF, -2.0) if name.endswith("absmax") else (-1.0, -INF)
            for number in bad:
                worse = value.clone()
                worse.view(-1)[-1] = number
                yield name, worse
        if name.endswith("absmax"):
            yield name, value.double()


@EACH
def test_a_state_that_does_not_fit_changes_nothing(row, device):
    """The error says which state of which parameter."""
    params = start(row, device=device)
    options = {"amsgrad": True} if row.cls in (Adam, AdamW) else {}
    optimizer = row.make([("small", params[2]), ("large", params[0])], **options)
    chosen = [params[2], params[0]]
    run(chosen, optimizer, range(3))
    before, groups, count = frozen(optimizer), options_of(optimizer), 0
    saved = copy.deepcopy(optimizer.state_dict())
    entry = saved["state"][1]
    bad = [(entry | {name: value}, name) for name, value in spoiled(row, entry)]
    optional = {"step"} if "exp_avg_sq" not in entry and row.by_element else {"RMS"}
    required = entry.keys() - optional if len(entry) > 1 else ()  # without any it starts anew
    bad += [({k: v for k, v in entry.items() if k != name}, name) for name in required]
    for spoilt, name in bad:
        groups_too = [saved["param_groups"][0] | {"weight_decay": 0.5}]
        state = {0: saved["state"][0], 1: spoilt}
        words = f"'{name}.*'large'|'large'.*'{name}|'large' have several"
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict({"state": state, "param_groups": groups_too})
        assert_frozen(optimizer, before, name)
        assert options_of(optimizer) == groups
        count += 1
    group = saved["param_groups"][0]
    for wrong in (
        [],
        [group | {"params": [0, 1, 2]}],
        [group | {"params": [0]}],
        [{k: v for k, v in group.items() if k != "params"}],
        [group, 3],
        {},
    ):
        with pytest.raises((ValueError, TypeError)):
            optimizer.load_state_dict(saved | {"param_groups": wrong})
    for wrong in ({}, saved | {"state": []}, {"state": {}}, [], saved | {"state": {0: 3}}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            optimizer.load_state_dict(wrong)
    assert_frozen(optimizer, before)
    assert not optimizer._optimizer_load_state_dict_pre_hooks and count > 5
    run(chosen, optimizer, [5])
    assert all(e.get("step", 4) == 4 for e in entries(optimizer))


def test_values_that_a_run_can_have_load(device):
    """Zeros of both signs, and a NaN that a gradient brought, which torch loads as well."""
    _, optimizer = trained(ADAMW, device=device)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_sq"].view(-1)[:3] = torch.tensor([0.0, -0.0, NAN])
    saved["state"][0]["exp_avg"].view(-1)[0] = -NAN
    optimizer.load_state_dict(saved)
    assert entries(optimizer)[0]["exp_avg_sq"].isnan().sum() == 1


def test_a_checkpoint_of_another_rule_is_refused():
    """Or keeps what makes the rule: AdamW stays decoupled whatever the checkpoint says."""
    params, adam = trained(named(Adam))
    for cls in (Lion, Lion8bit):
        with pytest.raises(ValueError, match="parameter 0 of group 0 has an 'exp_avg_sq'"):
            cls(params).load_state_dict(adam.state_dict())
    for cls in (AdamW, AdamW8bit):
        adamw = cls(params)
        adamw.load_state_dict(adam.state_dict())
        assert adamw.param_groups[0]["decoupled_weight_decay"] is True
    pair = [trained(row, 1)[1] for row in ROWS if row.cls is Adafactor]
    for one, other, word in zip(pair, reversed(pair), ("clip_threshold", "beta2_decay")):
        before = frozen(one)
        with pytest.raises(ValueError, match=f"another rule than semantics=.*{word}"):
            one.load_state_dict(other.state_dict())
        assert_frozen(one, before)


# ---- Copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_save])
@EACH
def test_a_copy_goes_on_alone(row, duplicate, device):
    """With options, attributes and counts, and with what override() chose, of parameters without a
    state too. A scheduler, which replaces step() by a function, does not come along."""
    options = {"max_grad_norm": 1.0, "count_stalled": True}
    params = start(row, device=device)
    optimizer = row.make(params, **options)
    if row.wide:
        optimizer.override(params[0], bits=32)
        optimizer.override(params[3], bits=32)
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    run(params[:3], optimizer, range(2))
    params[1].grad.view(-1)[0] = NAN
    optimizer.step()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = duplicate(optimizer)
    assert public(optimizer) == public(other) >= {"grad_norm"}
    assert type(other) is row.cls and "step" not in other.__dict__
    assert optimizer.defaults.items() <= other.defaults.items()
    assert other.grad_norm.isnan() and other.grad_scale == 2 and other._measured.culprit() == 1
    twins = parameters(other)
    assert other._measured_params[1] is twins[1]
    assert other.stalled_fraction() == optimizer.stalled_fraction()
    assert int(other._skips.total()) == int(optimizer._skips.total()) == 1
    before = frozen(optimizer)
    run(twins, other, [5, 6])
    assert_frozen(optimizer, before)
    run(params, optimizer, [5, 6])
    assert_same_bits(everything(optimizer), everything(other))
    if row.wide:
        with pytest.raises(ValueError, match="has a state already"):
            other.override(twins[0], bits=32)
        codes = [any(v.dtype == torch.uint8 for v in entry.values()) for entry in entries(other)]
        assert codes == [False, True, True, False]
    twins[0].grad.fill_(NAN)
    other.step()
    assert int(other._skips.total()) == 2


def public(optimizer):
    return {name for name in optimizer.__dict__ if not name.startswith("_")} - {"step"}


# ---- Reports -------------------------------------------------------------------------------------


@rows(lambda row: "Muon" not in row.name)  # which wants shapes
def test_memory_is_said_before_it_is_taken(row, device):
    """Frozen and lazy parameters take none; what has a state has it still when it is frozen."""
    model = torch.nn.ModuleDict(
        {
            "cold": torch.nn.Linear(9, 9, bias=False),
            "lazy": torch.nn.LazyLinear(5, bias=False),
            "warm": torch.nn.Linear(5, 6, bias=False),
        }
    ).to(device)
    model["cold"].requires_grad_(False)
    optimizer = row.make(list(model.named_parameters()))
    assert sum(row.numel for row in optimizer.memory()) == 30
    model["lazy"](torch.randn(2, 20, device=device))
    params = [model["lazy"].weight, model["warm"].weight]
    for p in params:
        p.grad = torch.ones_like(p)
    expected = optimizer.memory()
    optimizer.step()
    assert optimizer.memory() == expected and sum(row.numel for row in expected) == 130
    held = sum(value.nbytes for value in everything(optimizer)[3:])
    assert held == sum(sum(row.bytes.values()) for row in expected)
    model["lazy"].requires_grad_(False)
    assert optimizer.memory() == expected
    text = repr(optimizer)
    assert text.startswith(f"{row.cls.__name__} (\nParameter Group 0\n") and "'lazy.weight'" in text
    for one in expected:
        assert f"{one.bytes_per_parameter:.2f} bytes for each of 130 parameters" in text
