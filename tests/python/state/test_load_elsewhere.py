"""States in models of another precision or memory order, live states, and torch's checkpoints."""

import copy
import io
from functools import partial

import headroom
import pytest
import torch
from headroom._core.weight_modes import NEAREST, mode_of

from helpers import modes
from helpers.bits import assert_same_bits, same_bits
from helpers.modes import EVERY, entries
from helpers.resumed import ADAM, ADAMW, assert_same_run, build, train
from helpers.roundtrip import through_file
from helpers.samples import FLOATS

# ---- another precision, another memory order -----------------------------------------------------


def fits(mode, target):
    """Whether what is kept beside weights says something about weights of another precision: a
    float32 master does of all of 16 bits, and nothing that is kept does of float32."""
    way = mode_of(mode.options)
    return way.residual is None or (way.dtype == torch.float32 and target != torch.float32)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("name", EVERY)
def test_states_keep_their_dtype_when_the_model_changes_its(name, target):
    """torch casts states to the dtype of the parameter; ours are loaded byte for byte, or not at
    all if they complete weights of the other precision."""
    mode = EVERY[name]
    its_mode = mode if target in mode.params else mode.plain
    for dtype in mode.params:
        if dtype == target:
            continue
        model = modes.build(dtype)
        optimizer = mode.make(model.parameters())
        modes.train(model, optimizer, range(3))
        moved = modes.build(target, seed=5)
        other = its_mode.make(moved.parameters())
        modes.train(moved, other, range(1))
        before = copy.deepcopy([moved, other])
        saved = through_file(optimizer.state_dict())
        if not fits(mode, target):
            with pytest.raises(ValueError, match="belongs to weights|wanted one of"):
                other.load_state_dict(saved)
            groups = [o.state_dict()["param_groups"] for o in (other, before[1])]
            assert groups[0] == groups[1]
            assert_same_run(moved, other, *before)
            continue
        other.load_state_dict(saved)
        for left, right in zip(entries(optimizer), entries(other)):
            assert left.keys() == right.keys()
            assert_same_bits(left.values(), right.values())
        dtypes = [{key: value.dtype for key, value in e.items()} for e in entries(other)]
        modes.train(moved, other, range(3, 5))
        for entry, kept in zip(entries(other), dtypes):
            assert {key: value.dtype for key, value in entry.items()} == kept
            assert entry.get("step", 5) == 5  # SGD without momentum counts none


@pytest.mark.parametrize("name", [name for name in EVERY if "remainder" in name])
def test_options_that_do_not_fit_the_weights_are_refused_before_there_is_a_state(name):
    saved = EVERY[name].make(modes.build(torch.bfloat16).parameters()).state_dict()
    model = modes.build(torch.float16)
    optimizer = EVERY[name].plain.make(model.parameters())
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match="needs bfloat16 weights"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize("name", [n for n in EVERY if mode_of(EVERY[n].options) is not NEAREST])
def test_a_checkpoint_without_a_mode_for_weights_leaves_that_of_the_optimizer(name):
    """As torch's is: what is kept beside the weights starts anew."""
    mode = EVERY[name]
    way = mode_of(mode.options)
    model = modes.build(torch.bfloat16)
    optimizer = mode.plain.make(model.parameters())
    modes.train(model, optimizer, range(2))
    other = mode.make(model.parameters())
    other.load_state_dict(through_file(optimizer.state_dict()))
    modes.train(model, other, range(2, 3))
    assert mode_of(other.param_groups[0]) is way
    for param in model.parameters():
        kept = way.residual is not None and param.dtype == torch.bfloat16
        assert (way.residual in other.state[param]) == kept


def test_model_moved_in_place_after_the_optimizer_was_made():
    """model.to() swaps the data of parameters: states stay as they are, and the step goes on."""
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    before = copy.deepcopy(entries(optimizer))
    model.to(torch.bfloat16)
    for left, right in zip(entries(optimizer), before):
        assert_same_bits(left.values(), right.values())
    reference = build(dtype=torch.bfloat16)
    reference.load_state_dict(model.state_dict())
    other = ADAMW(reference.parameters(), lr=1e-2)
    other.load_state_dict(through_file(optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    train(reference, other, range(2, 4))
    assert_same_run(model, optimizer, reference, other)


@pytest.mark.parametrize("into_channels_last", [True, False])
@pytest.mark.parametrize("source", [ADAMW, torch.optim.AdamW])
def test_load_into_another_memory_format(source, into_channels_last):
    formats = (torch.contiguous_format, torch.channels_last)
    model = build(convolution=True).to(memory_format=formats[not into_channels_last])
    optimizer = source(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    saved = through_file([model.state_dict(), optimizer.state_dict()])

    other = build(seed=5, convolution=True).to(memory_format=formats[into_channels_last])
    other.load_state_dict(saved[0])
    # Parameters are copied into, so the model keeps its own order.
    assert other[0].weight.is_contiguous(memory_format=formats[into_channels_last])
    resumed = ADAMW(other.parameters(), lr=1e-2)
    resumed.load_state_dict(saved[1])
    assert resumed.state[other[0].weight]["exp_avg"].stride() == other[0].weight.stride()
    for left, right in zip(entries(optimizer), entries(resumed)):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(left[name], right[name])

    # Convolutions round otherwise in another order, so the gradients are given.
    unmoved = build(convolution=True)
    unmoved.load_state_dict(saved[0])
    reference = ADAMW(unmoved.parameters(), lr=1e-2)
    reference.load_state_dict(copy.deepcopy(saved[1]))  # or the two would share states
    for _ in range(2):
        for p, q in zip(other.parameters(), unmoved.parameters()):
            q.grad = torch.randn(q.shape)
            p.grad = torch.empty_like(p).copy_(q.grad)
        resumed.step()
        reference.step()
    assert_same_run(unmoved, reference, other, resumed)


# ---- live states ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_live_round_trip_keeps_every_byte(name):
    """What accelerate does with every optimizer at prepare()."""
    model = modes.build(torch.bfloat16)
    optimizer = EVERY[name].make(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())  # no state yet
    for step in range(3):
        modes.train(model, optimizer, [step])
        before = copy.deepcopy(entries(optimizer))
        optimizer.load_state_dict(optimizer.state_dict())
        for left, right in zip(entries(optimizer), before):
            assert list(left) == list(right)
            assert_same_bits(left.values(), right.values())


def everything(optimizer):
    """Copies of all tensors in the states of an optimizer."""
    return [tensor.clone() for entry in entries(optimizer) for tensor in entry.values()]


@pytest.mark.parametrize("source", ["live", "snapshot"])
@pytest.mark.parametrize("name", EVERY)
def test_no_step_moves_a_state_that_another_optimizer_has_loaded(name, source):
    """Of two runs from one state, or of a run and the snapshot that it goes back to, torch's write
    to one another's moments."""
    first, second = modes.build(torch.bfloat16), modes.build(torch.bfloat16)
    a, b = (EVERY[name].make(model.parameters()) for model in (first, second))
    modes.train(first, a, range(2))
    given = a.state_dict() if source == "live" else copy.deepcopy(a.state_dict())
    b.load_state_dict(given)
    before, loaded = everything(a), everything(b)
    modes.train(second, b, [2])
    assert_same_bits(everything(a), before)
    kept = [tensor for key in sorted(given["state"]) for tensor in given["state"][key].values()]
    assert_same_bits(kept, before)
    b.load_state_dict(copy.deepcopy(given))
    assert_same_bits(everything(b), loaded)
    modes.train(first, a, [2])
    assert_same_bits(everything(b), loaded)


@pytest.mark.parametrize("what", ["state", "step"])
def test_an_offloaded_state_is_nobody_elses(what):
    given = build(), build()
    a, b = (ADAMW(given[0].parameters(), lr=1e-2), ADAMW(given[1].parameters(), offload=what))
    train(given[0], a, range(2))
    b.load_state_dict(a.state_dict())
    before = everything(a)
    train(given[1], b, [2])
    assert_same_bits(everything(a), before)


def test_what_others_keep_in_a_state_is_copied_too():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    a, b = (ADAMW([param]) for param in params)
    a.state[params[0]]["ema"] = torch.zeros(3)
    a.state["more"] = {"parts": [torch.zeros(3)], "count": 2}
    for entry in entries(a):
        entry |= {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    b.load_state_dict(a.state_dict())
    b.state[params[1]]["ema"].add_(1)
    b.state["more"]["parts"][0].add_(1)
    assert b.state["more"]["count"] == 2
    assert a.state[params[0]]["ema"].sum() == 0 == a.state["more"]["parts"][0].sum()


def test_one_tensor_in_two_states_becomes_two():
    """Files keep what tensors share."""
    optimizer = ADAMW([torch.nn.Parameter(torch.ones(2)) for _ in range(2)])
    first = {"step": torch.tensor(1.0, dtype=torch.float64)}
    first |= {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    given = optimizer.state_dict() | {"state": {0: first, 1: dict(first)}}
    file = io.BytesIO()
    torch.save(given, file)
    optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones(2)
    optimizer.step()
    assert [entry["step"] for entry in entries(optimizer)] == [2, 2]


LENGTH, COUNT = 1 << 16, 8


def stepped(**options):
    params = [torch.nn.Parameter(torch.ones(LENGTH)) for _ in range(COUNT)]
    optimizer = ADAMW(params, **options)
    for param in params:
        param.grad = torch.ones(LENGTH)
    optimizer.step()
    return optimizer


def allocated(run):
    """The largest number of bytes that were allocated on the CPU beyond those at the beginning."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    now = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    return peak


def test_a_load_takes_the_memory_of_one_tensor_more():
    """The states that there were go as their copies come, and an optimizer's own states stay."""
    snapshot, tensor = stepped().state_dict(), 4 * LENGTH
    with_gradients = COUNT * 4 * tensor
    assert allocated(lambda: stepped().load_state_dict(snapshot)) < with_gradients + 1.1 * tensor
    own = stepped()
    assert allocated(lambda: own.load_state_dict(own.state_dict())) < 0.1 * tensor


def test_a_load_from_a_file_takes_no_second_copy(tmp_path):
    headroom.save_state(tmp_path / "state", optimizer=stepped())
    fresh, size = ADAMW([torch.nn.Parameter(torch.ones(LENGTH)) for _ in range(COUNT)]), 8 * LENGTH
    load = partial(headroom.load_state, tmp_path / "state", optimizer=fresh, progress=False)
    assert COUNT * size <= allocated(load) < (COUNT + 1) * size


def test_two_optimizers_from_one_file_or_copy_are_independent():
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    runs = []
    for _ in range(2):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other = build()
        other.load_state_dict(saved[0])
        runs.append((other, ADAMW(other.parameters(), lr=1e-2)))
        runs[-1][1].load_state_dict(saved[1])
    train(*runs[0], range(2, 5))
    assert all(entry["step"] == 2 for entry in entries(runs[1][1]))
    train(*runs[1], range(2, 5))
    assert_same_run(*runs[0], *runs[1])

    copied = copy.deepcopy((model, optimizer))
    train(*copied, range(2, 5))
    assert all(entry["step"] == 2 for entry in entries(optimizer))
    train(model, optimizer, range(2, 5))
    assert_same_run(model, optimizer, *copied)
    assert_same_run(model, optimizer, *runs[0])


# ---- torch's checkpoints -------------------------------------------------------------------------


THEIRS = {
    "AdamW": (ADAMW, torch.optim.AdamW, {}),
    "Adam": (ADAM, torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (ADAMW, torch.optim.AdamW, {"amsgrad": True}),
    "fused": (ADAMW, torch.optim.AdamW, {"fused": True}),
    "foreach": (ADAMW, torch.optim.AdamW, {"foreach": True}),
}


@pytest.mark.parametrize("direction", ["from torch", "to torch"])
@pytest.mark.parametrize("name", THEIRS)
def test_checkpoints_of_torch_and_headroom_resume_each_other(name, direction):
    ours, theirs, options = THEIRS[name]
    source, target = (theirs, ours) if direction == "from torch" else (ours, theirs)
    model = build()
    optimizer = source(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, range(3))
    saved = through_file([model.state_dict(), optimizer.state_dict()])
    resumed = build(seed=5)
    resumed.load_state_dict(saved[0])
    other = target(resumed.parameters(), lr=1e-2, **options)
    other.load_state_dict(saved[1])
    for left, right in zip(entries(optimizer), entries(other)):
        assert left.keys() == right.keys()
        assert all(same_bits(left[n], right[n]) for n in left if n != "step")
        assert left["step"] == right["step"] == 3
    train(model, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    for p, q in zip(model.parameters(), resumed.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert all(entry["step"] == 6 for entry in entries(other))


def test_a_failed_load_leaves_the_optimizer_as_it_was():
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    unchanged = build()
    other = ADAMW(unchanged.parameters(), lr=1e-2)
    train(unchanged, other, range(2))
    for key, wrong in {
        "exp_avg": torch.zeros(1),
        "exp_avg_sq": torch.zeros(2, 7, dtype=torch.int64),
        "step": torch.tensor(-1.0),
    }.items():
        saved = through_file(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 7.0
        saved["state"][2][key] = wrong  # the third of four
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert_same_run(model, optimizer, unchanged, other)
    train(model, optimizer, range(2, 4))
    train(unchanged, other, range(2, 4))
    assert_same_run(model, optimizer, unchanged, other)
