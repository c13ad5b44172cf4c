"""Saving and loading: a resumed run has the bits of one that never stopped."""

import copy
import io
import random

import headroom
import pytest
import torch
from torch import nn

from reference import FLOATS, assert_same_bits, same_bits

ADAMW, ADAM = headroom.optim.AdamW, headroom.optim.Adam
ADAMW8BIT = headroom.optim.AdamW8bit
STEPS = 6


def build(seed=0, dtype=torch.float32, convolution=False):
    torch.manual_seed(seed)
    if convolution:
        return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)).to(dtype)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def train(model, optimizer, steps):
    """Data of a step depends on nothing but its number."""
    convolution = isinstance(model[0], nn.Conv2d)
    dtype = next(model.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn((2, 3, 5, 5) if convolution else (8, 5), generator=generator)
        optimizer.zero_grad()
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()


def through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def entries(optimizer):
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def assert_same_run(model, optimizer, other, other_optimizer):
    assert_same_bits(model.parameters(), other.parameters())
    for left, right in zip(entries(optimizer), entries(other_optimizer)):
        assert left.keys() == right.keys()
        assert_same_bits(left.values(), right.values())


# ---- resuming ------------------------------------------------------------------------------------

OPTIONS = {
    "default": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "adam": {"cls": ADAM, "weight_decay": 0.1},
    "state_dtype": {"state_dtype": torch.bfloat16},
    "f16 states": {"state_dtype": torch.float16, "amsgrad": True},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 with f32 states": {"dtype": torch.bfloat16, "state_dtype": torch.float32},
    "f16": {"dtype": torch.float16, "eps": 1e-4},
    "tensor lr": {"lr": torch.tensor(1e-2)},
    "8 bits": {"cls": ADAMW8BIT, "min_8bit_size": 0},
    "8 and 32 bits": {"cls": ADAMW8BIT, "min_8bit_size": 10, "dtype": torch.bfloat16},
    "8 bits, options": {
        "cls": headroom.optim.Adam8bit,
        "min_8bit_size": 3,
        "block_size": 64,
        "stochastic_rounding": True,
        "seed": 2**32 - 1,
        "nonfinite": "skip_element",
    },
}


@pytest.mark.parametrize("k", range(STEPS))
@pytest.mark.parametrize("name", OPTIONS)
def test_resume_at_every_step(name, k):
    options = {"lr": 1e-2, "weight_decay": 0.1, **OPTIONS[name]}
    cls, dtype = options.pop("cls", ADAMW), options.pop("dtype", torch.float32)

    def fresh(seed):
        model = build(seed, dtype)
        return model, cls(model.parameters(), **copy.deepcopy(options))

    model, optimizer = fresh(k)
    train(model, optimizer, range(k))
    saved = through_file([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(k, STEPS))

    resumed, other = fresh(seed=99)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for i, entry in enumerate(entries(other) if k else []):
        source = saved[1]["state"][i]
        assert entry["step"] == k and entry["step"].dtype == torch.float64
        assert {n: v.dtype for n, v in entry.items()} == {n: v.dtype for n, v in source.items()}
        if cls in (ADAM, ADAMW):
            assert entry["exp_avg"].dtype == options.get("state_dtype", dtype)
    train(resumed, other, range(k, STEPS))
    assert_same_run(model, optimizer, resumed, other)


@pytest.mark.parametrize("seed", range(12))
def test_resume_property(seed):
    """Random options, random groups, frozen parameters, and saves at random steps, often more."""
    choose = random.Random(seed)
    dtype = choose.choice(FLOATS)
    common = dict(
        lr=choose.choice([1e-3, 1e-1]),
        betas=choose.choice([(0.9, 0.999), (0.0, 0.5)]),
        weight_decay=choose.choice([0.0, 0.1]),
        eps=1e-4,
        maximize=choose.choice([False, True]),
    )
    groups = [
        dict(amsgrad=choose.choice([False, True]), lr=choose.choice([1e-3, 1e-2])) for _ in range(2)
    ]
    state_dtype = choose.choice([None, *FLOATS])
    cls = choose.choice([ADAM, ADAMW])
    frozen = choose.randrange(STEPS)
    saves = {step for step in range(STEPS) if choose.random() < 0.4}

    def fresh():
        model = build(seed, dtype)
        params = list(model.parameters())
        split = [groups[0] | {"params": params[:1]}, groups[1] | {"params": params[1:]}]
        return model, cls(split, state_dtype=state_dtype, **common)

    model, optimizer = fresh()
    resumed, other = fresh()
    for step in range(STEPS):
        if step in saves:
            saved = through_file([resumed.state_dict(), other.state_dict()])
            resumed, other = fresh()
            resumed.load_state_dict(saved[0])
            other.load_state_dict(saved[1])
        for m, o in ((model, optimizer), (resumed, other)):
            m[2].requires_grad_(step != frozen)
            train(m, o, [step])
    assert_same_run(model, optimizer, resumed, other)


def test_a_later_option_survives_the_file():
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2, state_dtype=torch.bfloat16)
    train(model, optimizer, range(2))
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25, betas=(0.5, 0.6))
    other = ADAMW(build().parameters())
    other.load_state_dict(through_file(optimizer.state_dict()))
    wanted = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert {k: v for k, v in other.param_groups[0].items() if k != "params"} == wanted
    assert wanted["lr"] == 0.5 and wanted["state_dtype"] == torch.bfloat16


def test_saved_tensors_are_a_snapshot_of_the_file_only():
    """The file holds the state of the moment of saving: later steps do not reach it."""
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    before = copy.deepcopy(entries(optimizer))
    saved = through_file(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    for entry, kept in zip(saved["state"].values(), before):
        assert_same_bits(entry.values(), kept.values())


# ---- another precision, another memory order -----------------------------------------------------


@pytest.mark.parametrize("state", FLOATS)
@pytest.mark.parametrize("param", FLOATS)
def test_states_keep_their_dtype_when_the_model_changes_its(param, state):
    """torch casts states to the dtype of the parameter; ours are loaded byte for byte."""
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2, state_dtype=state)
    train(model, optimizer, range(3))
    moved = build(seed=5).to(param)
    moved.load_state_dict({name: p.to(param) for name, p in model.state_dict().items()})
    other = ADAMW(moved.parameters(), lr=1e-2)
    other.load_state_dict(through_file(optimizer.state_dict()))
    for left, right in zip(entries(optimizer), entries(other)):
        assert_same_bits(left.values(), right.values())
    train(moved, other, range(3, 5))
    for entry in entries(other):
        assert entry["step"] == 5 and entry["exp_avg"].dtype == state
    assert all(p.isfinite().all() and p.dtype == param for p in moved.parameters())


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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("state_dtype", [None, *FLOATS])
def test_live_round_trip_keeps_every_byte(dtype, state_dtype):
    """What accelerate does with every optimizer at prepare()."""
    model = build(dtype=dtype)
    optimizer = ADAMW(model.parameters(), lr=1e-2, amsgrad=True, state_dtype=state_dtype)
    unchanged = build(dtype=dtype)
    other = ADAMW(unchanged.parameters(), lr=1e-2, amsgrad=True, state_dtype=state_dtype)
    optimizer.load_state_dict(optimizer.state_dict())  # no state yet
    for step in range(4):
        train(model, optimizer, [step])
        train(unchanged, other, [step])
        before = copy.deepcopy(entries(optimizer))
        optimizer.load_state_dict(optimizer.state_dict())
        for left, right in zip(entries(optimizer), before):
            assert list(left) == list(right)
            assert_same_bits(left.values(), right.values())
    assert_same_run(model, optimizer, unchanged, other)


def sharing(cls):
    """Which states two optimizers share after one state_dict was loaded into both, and with it."""
    model = build()
    optimizer = cls(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    loaded = []
    for _ in range(2):
        loaded.append(cls(build().parameters(), lr=1e-2))
        loaded[-1].load_state_dict(state)

    def shared(left, right):
        pairs = zip(entries(left), entries(right))
        return [{name: a[name].data_ptr() == b[name].data_ptr() for name in a} for a, b in pairs]

    return shared(*loaded), shared(optimizer, loaded[0])


def test_loading_shares_memory_as_torch_does():
    """load_state_dict() copies nothing that it need not convert: tensors of a live state_dict are
    then states of both. Those who want two runs from one state deep-copy it, as with torch."""
    assert sharing(ADAMW) == sharing(torch.optim.AdamW)


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
