"""Saving and loading: a resumed run has the bits of one that never stopped."""

import copy
import io
import math
import random

import headroom
import pytest
import torch
from headroom._core.weight_modes import NEAREST, RESIDUALS, mode_of
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from helpers import modes, training
from helpers.bits import assert_same_bits, same_bits
from helpers.modes import EVERY, WEIGHTS, entries
from helpers.roundtrip import through_file
from helpers.samples import FLOATS

ADAMW, ADAM = headroom.optim.AdamW, headroom.optim.Adam
STEPS = 6


def build(seed=0, dtype=torch.float32, convolution=False):
    torch.manual_seed(seed)
    if convolution:
        return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)).to(dtype)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def train(model, optimizer, steps):
    convolution = isinstance(model[0], nn.Conv2d)
    dtype = next(model.parameters()).dtype

    def backward(step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn((2, 3, 5, 5) if convolution else (8, 5), generator=generator)
        model(x.to(dtype)).square().mean().backward()

    training.train(optimizer, steps, backward)


def assert_same_run(model, optimizer, other, other_optimizer):
    assert_same_bits(model.parameters(), other.parameters())
    for left, right in zip(entries(optimizer), entries(other_optimizer)):
        assert left.keys() == right.keys()
        assert_same_bits(left.values(), right.values())


# ---- resuming ------------------------------------------------------------------------------------

HOWS = ("plainly", "scaler", "accumulator", "release")


class Run:
    """A model in training with all that has a state, chosen at random for each third of a run."""

    def __init__(self, name, part, seed):
        choose = random.Random(f"{name} {part}")
        mode = EVERY[name]
        self.k = part * 2 + choose.randrange(2)  # when it is saved
        self.how, self.frozen = choose.choice(HOWS), choose.randrange(STEPS)
        self.model = modes.build(choose.choice(mode.params), seed)
        clip = choose.choice([None, 0.5])
        more = {} if clip is None else {"max_grad_norm": clip}
        self.optimizer = optimizer = mode.make(self.model.parameters(), **more)
        self.parts = {"model": self.model, "optimizer": optimizer}
        self.others = {}  # which save_state() does not know
        if optimizer.param_groups[0]["lr"] is not None:
            self.parts["scheduler"] = ExponentialLR(optimizer, 0.9)
        if self.how == "scaler":
            self.parts["scaler"] = headroom.amp.GradScaler(
                "cpu", 2.0**8, growth_interval=2, hysteresis=2
            )
        if self.how == "accumulator":
            self.others["accumulator"] = headroom.GradAccumulator(
                self.model, compensated=choose.random() < 0.5
            )
        if self.how == "release":
            self.others["handle"] = headroom.optim.release_gradients(
                self.model, optimizer, clip="previous" if clip else None, bucket_bytes=1000
            )

    def begin(self, step):
        """The first two of three micro-batches, if there are such."""
        self.model.outer.weight.requires_grad_(step != self.frozen)
        if self.how == "accumulator":
            for number in (100 + step, 200 + step):
                with self.others["accumulator"].micro_batch(3):
                    modes.loss_of(self.model, modes.batch(number)).backward()

    def end(self, step):
        loss = modes.loss_of(self.model, modes.batch(step))
        if self.how == "accumulator":
            with self.others["accumulator"].micro_batch(2):
                loss.backward()
            self.others["accumulator"].finish()
        elif self.how == "scaler":
            self.parts["scaler"].scale(loss).backward()
            if step == 2:
                self.model.mix.grad[0, 0, 0] = math.inf
            self.parts["scaler"].step(self.optimizer)
            self.parts["scaler"].update()
        else:
            loss.backward()
        if self.how != "scaler":
            self.optimizer.step()
        self.optimizer.zero_grad()
        if "scheduler" in self.parts:
            self.parts["scheduler"].step()

    def go_on(self, first, live=False):
        self.end(first)
        for step in range(first + 1, STEPS):
            if live:  # what accelerate does with every optimizer at prepare()
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            self.begin(step)
            self.end(step)

    def states(self):
        return {name: part.state_dict() for name, part in (self.parts | self.others).items()}

    def load(self, states):
        for name, part in (self.parts | self.others).items():
            part.load_state_dict(states[name])


@pytest.mark.parametrize("part", range(STEPS // 2))
@pytest.mark.parametrize("name", EVERY)
def test_resume(name, part, memory_path):
    """By torch's file, by ours and by the live state, also between the micro-batches of a step."""
    whole = Run(name, part, seed=part)
    k = whole.k
    for step in range(k):
        whole.begin(step)
        whole.end(step)
    whole.begin(k)
    saved, live = through_file(whole.states()), copy.deepcopy(whole.states())
    path = memory_path / "state.safetensors"
    more = {name: other.state_dict() for name, other in whole.others.items()}
    headroom.save_state(path, **whole.parts, extra=more)
    whole.go_on(k)
    for way in ("torch.load", "load_state", "live"):
        other = Run(name, part, seed=99)
        other.begin(k)  # has sums, and a state, of its own
        if way == "load_state":
            for key, state in headroom.load_state(path, **other.parts).items():
                other.others[key].load_state_dict(state)
        else:
            other.load(saved if way == "torch.load" else live)
        other.go_on(k, way == "live")
        assert_same_run(whole.model, whole.optimizer, other.model, other.optimizer)
        for key in other.parts.keys() - {"model", "optimizer"}:
            assert whole.parts[key].state_dict() == other.parts[key].state_dict(), way
    assert all(p.isfinite().all() for p in whole.model.parameters())


@pytest.mark.parametrize("seed", range(12))
def test_resume_property(seed):
    """Random options, random groups, frozen parameters, and saves at random steps, often more."""
    choose = random.Random(seed)
    dtype = choose.choice(FLOATS)
    cls = choose.choice([ADAM, ADAMW, headroom.optim.AdamW8bit, headroom.optim.Adafactor])
    weights = [way for way in [{}, *WEIGHTS] if dtype in mode_of(way).params]
    groups = [
        {"lr": choose.choice([1e-3, 1e-2]), **choose.choice(weights), "seed": choose.randrange(9)}
        for _ in range(2)
    ]
    common = {"lr": choose.choice([1e-3, 1e-1]), "weight_decay": choose.choice([0.0, 0.1])}
    if cls is not headroom.optim.Adafactor:
        common |= {"betas": choose.choice([(0.9, 0.999), (0.0, 0.5)]), "eps": 1e-4}
        common["maximize"] = choose.choice([False, True])
    if cls in (ADAM, ADAMW):
        common["state_dtype"] = choose.choice([None, *FLOATS])
        for group in groups:
            group["amsgrad"] = choose.choice([False, True])
    frozen = choose.randrange(STEPS)
    saves = {step for step in range(STEPS) if choose.random() < 0.4}

    def fresh():
        model = build(seed, dtype)
        params = list(model.parameters())
        split = [groups[0] | {"params": params[:1]}, groups[1] | {"params": params[1:]}]
        return model, cls(split, **common)

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


@pytest.mark.parametrize("name", EVERY)
def test_a_run_that_moves_between_devices(name, device, memory_path):
    """From the CPU to another device and back, by either file. Gradients are given. The bits are
    those of a run that stayed, and for Adafactor, whose sums differ, about its numbers."""
    start = [p.detach() for p in modes.build(torch.bfloat16).parameters()]

    def on(place, values):
        params = nn.ParameterList(value.to(place, copy=True) for value in values)
        return params, EVERY[name].make(params.parameters())

    def go(params, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(param)
            optimizer.step()

    stayed, optimizer = on("cpu", start)
    go(stayed, optimizer, range(6))
    moved, other = on("cpu", start)
    go(moved, other, range(2))
    through_torch = through_file([moved.state_dict(), other.state_dict()])
    headroom.save_state(memory_path / "1", model=moved, optimizer=other, progress=False)
    for way in ("torch", "headroom"):
        there = on(device, start)
        if way == "torch":
            there[0].load_state_dict(through_torch[0])
            there[1].load_state_dict(through_torch[1])
        else:
            headroom.load_state(memory_path / "1", model=there[0], optimizer=there[1])
        go(*there, range(2, 4))
        back = on("cpu", start)
        if way == "torch":
            saved = through_file([part.state_dict() for part in there])
            back[0].load_state_dict(saved[0])
            back[1].load_state_dict(saved[1])
        else:
            headroom.save_state(memory_path / "2", model=there[0], optimizer=there[1])
            headroom.load_state(memory_path / "2", model=back[0], optimizer=back[1])
        go(*back, range(4, 6))
        if device == "cpu" or EVERY[name].cls is not headroom.optim.Adafactor:
            assert_same_run(stayed, optimizer, *back)
            continue
        weights = [headroom.optim.master_weights(of) for of in (optimizer, back[1])]
        for p, q in zip(stayed, back[0]):
            torch.testing.assert_close(weights[0][p], weights[1][q], rtol=2**-6, atol=1e-3)
            for key in optimizer.state[p].keys() - set(RESIDUALS):
                left, right = optimizer.state[p][key], back[1].state[q][key]
                torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-6, equal_nan=True)


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
            assert entry["step"] == 5


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
