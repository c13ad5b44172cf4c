"""Saving and loading: a resumed run has the bits of one that never stopped."""

import copy
import math
import random

import headroom
import pytest
import torch
from headroom._core.weight_modes import RESIDUALS, mode_of
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.modes import EVERY, WEIGHTS, entries
from helpers.resumed import ADAM, ADAMW, assert_same_run, build, train
from helpers.roundtrip import through_file
from helpers.samples import FLOATS

STEPS = 6
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
            self.others["handle"] = headroom.release_gradients(
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
    those of a run that stayed, and for Adafactor, whose sums differ, and Muon, whose products do,
    about its numbers."""
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
        if device == "cpu" or not name.startswith(("adafactor", "muon")):
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
