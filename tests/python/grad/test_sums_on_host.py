"""GradAccumulator(host=): sums in the arena, with the bits of sums on the device."""

import copy
import gc
from functools import partial

import headroom
import pytest
import torch
from headroom.grad import on_host
from headroom.host import HostArena, HostMemoryError, cutting
from headroom.host.arena import in_arena
from torch.nn.functional import mse_loss

from helpers.bits import assert_same_bits
from helpers.copies import POLICIES, Failing, adversary
from helpers.samples import FLOATS


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """So that sums are cut, and several share a slot."""
    monkeypatch.setattr(on_host, "SLOT_BYTES", 1024)
    monkeypatch.setattr(cutting, "CUT", 16)


class Model(torch.nn.Module):
    """Two layers, one of them used only when it is asked for, one frozen, and an empty weight."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(9, 33), torch.nn.Linear(33, 5)
        self.rare, self.empty = torch.nn.Linear(5, 5), torch.nn.Parameter(torch.zeros(0, 3))
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.to(dtype)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()  # in another order

    def forward(self, x, rare):
        x = self.second(torch.tanh(self.first(x)))
        return self.frozen(self.rare(x) if rare else x) + self.empty.sum()


def run(accumulator, model, steps=2, weights=(3, 0, 1, 2), between=lambda k: None):
    """Returns the means of some steps."""
    found, dtype = [], next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        for k, weight in enumerate(weights):
            x = torch.randn(4, 9, generator=generator).to(dtype)
            with accumulator.micro_batch(weight):
                mse_loss(model(x, rare=k == 2 - step), torch.ones(4, 5, dtype=dtype)).backward()
            between(k)
        accumulator.finish()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert not any(in_arena(p.grad) for p in model.parameters() if p.grad is not None)
        model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("compensated", [False, True])
def test_the_bits_of_sums_on_the_device(dtype, compensated):
    models = [Model(dtype) for _ in range(2)]
    arena = HostArena()
    accumulators = [
        headroom.GradAccumulator(model, compensated=compensated, host=host)
        for model, host in zip(models, (False, arena))
    ]
    sizes = []
    one, other = (
        run(accumulator, model, between=lambda _: sizes.append(arena.bytes))
        for accumulator, model in zip(accumulators, models)
    )
    assert_same_bits(one, other)
    trained = sum(p.numel() for p in models[0].parameters() if p.requires_grad)
    width = (8 if dtype == torch.float64 else 4) * (1 + compensated)
    assert sizes[7] == 0 and trained * width <= sizes[-1] <= trained * width + 64 * 14
    assert arena.memory() == {("gradients", "GradAccumulator"): arena.bytes}
    del accumulators
    gc.collect()
    assert arena.bytes == 0


def test_what_is_unfrozen_later_and_gradients_of_another_order():
    models = [Model() for _ in range(2)]

    def change(model, k):
        if k == 0:
            model.frozen.requires_grad_(True)
        weight = model.second.weight
        weight.data = weight.data.t().contiguous().t() if k % 2 else weight.data.contiguous()

    found = [
        run(headroom.GradAccumulator(model, host=host), model, between=partial(change, model))
        for model, host in zip(models, (False, HostArena()))
    ]
    assert_same_bits(*found)


def test_sums_leave_the_device():
    """As headroom.memory counts them, between micro-batches."""

    def held(host):
        model = torch.nn.Linear(300, 300)
        accumulator = headroom.GradAccumulator(model, host=host)
        with headroom.memory.track(model) as tracked:
            with accumulator.micro_batch():
                model(torch.ones(2, 300)).sum().backward()
        return sum(a.bytes for a in tracked.timeline.allocations if a.end is None)

    away, here = held(HostArena()), held(False)
    assert here - away == pytest.approx(4 * 300 * 301, abs=8192)


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("from_host", [False, True])
@pytest.mark.parametrize("compensated", [False, True])
def test_a_restart_between_micro_batches(from_host, to_host, compensated):
    models = [Model() for _ in range(3)]
    hosts = (HostArena() if from_host else False, HostArena() if to_host else False, False)
    one, other, plain = (
        headroom.GradAccumulator(model, compensated=compensated, host=host)
        for model, host in zip(models, hosts)
    )
    saved = []
    run(one, models[0], 1, between=lambda k: saved.append(copy.deepcopy(one.state_dict())))
    state = saved[2]
    assert not any(in_arena(x) for x in state["sums"] if x is not None)
    wanted = run(plain, models[2], 1)
    other.load_state_dict(state)
    generator = torch.Generator().manual_seed(5)
    *_, x = (torch.randn(4, 9, generator=generator) for _ in range(4))
    with other.micro_batch(2):
        mse_loss(models[1](x, rare=False), torch.ones(4, 5)).backward()
    other.finish()
    found = [p.grad for p in models[1].parameters() if p.grad is not None]
    assert_same_bits(found, wanted)


# ---- engines -------------------------------------------------------------------------------------


def copying_with(monkeypatch, engine):
    """Lets sums pass through an engine for which additions are work of the device."""
    monkeypatch.setattr(on_host, "engine_of", lambda device: engine)
    step, brought = on_host._Part.step, on_host.HostSums.brought

    def deferred(self, factor):
        engine.compute(partial(step, self, factor))

    def after_all(self, param):
        found = brought(self, param)
        engine.finish_compute()
        return found

    monkeypatch.setattr(on_host._Part, "step", deferred)
    monkeypatch.setattr(on_host.HostSums, "brought", after_all)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_does_what_a_device_may_do(policy, reads, monkeypatch):
    models, states = [Model() for _ in range(2)], ([], [])

    def trained(host, model, states):
        accumulator = headroom.GradAccumulator(model, host=host)

        def read(k):
            if reads:
                sums = accumulator.state_dict()["sums"]
                states.extend(x.clone() for x in sums if x is not None)

        return run(accumulator, model, 3, between=read), accumulator

    wanted, _ = trained(False, models[0], states[0])
    engine = adversary(policy)
    copying_with(monkeypatch, engine)
    found, accumulator = trained(HostArena(), models[1], states[1])
    assert_same_bits(found, wanted)
    assert_same_bits(*states)
    with accumulator.micro_batch():
        models[1](torch.ones(1, 9), False).sum().backward()
    del accumulator
    gc.collect()
    assert not any(work.copy for queue in engine.queues.values() for work in queue)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_sum_takes_each_slot_several_times(policy, monkeypatch):
    """Nothing is copied up then, but a slot is free only when it has been copied down."""
    model, engine = torch.nn.Linear(40, 40, bias=False), adversary(policy)
    copying_with(monkeypatch, engine)
    accumulator, x = headroom.GradAccumulator(model, host=HostArena()), torch.randn(4, 40)
    with accumulator.micro_batch():
        model(x).square().sum().backward()
    accumulator.finish()
    (wanted,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    assert torch.equal(model.weight.grad, wanted)


def test_a_sum_comes_back_to_memory_that_something_still_writes_to(monkeypatch):
    model, engine = torch.nn.Linear(4, 4, bias=False), adversary("up")
    copying_with(monkeypatch, engine)
    accumulator = headroom.GradAccumulator(model, host=HostArena())
    with accumulator.micro_batch():
        model(torch.ones(1, 4)).sum().backward()
    accumulator._host.wait()
    memory = torch.zeros(64, dtype=torch.uint8)
    engine.compute(lambda: memory.fill_(7))
    with monkeypatch.context() as patch:
        patch.setattr(on_host.torch, "empty", lambda size, **options: memory)
        found = accumulator._host.brought(model.weight)
    assert torch.equal(found, torch.ones(4, 4))


@pytest.mark.parametrize("k", range(1, 40, 3))
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_drops_the_step(k, error, monkeypatch):
    """What was added is not known then; the next step has the bits of one without a failure."""
    models = [Model() for _ in range(2)]
    wanted = run(headroom.GradAccumulator(models[0]), models[0], 1)
    engine = Failing(k, lambda: error("failed"))
    monkeypatch.setattr(on_host, "engine_of", lambda device: engine)
    accumulator = headroom.GradAccumulator(models[1], host=HostArena())
    try:
        run(accumulator, models[1], 1)
    except error:
        models[1].zero_grad()
        with pytest.raises(RuntimeError, match="without a micro-batch"):
            accumulator.finish()
    engine.left = -1
    assert_same_bits(run(accumulator, models[1], 1), wanted)


def test_no_room_on_the_host():
    model = Model()
    accumulator = headroom.GradAccumulator(model, host=HostArena(1000))
    with pytest.raises(HostMemoryError, match="gradients of GradAccumulator"):
        run(accumulator, model, 1)
    with pytest.raises(TypeError, match="host is str, wanted a bool or a headroom.HostArena"):
        headroom.GradAccumulator(model, host="yes")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compensated", [False, True])
def test_sums_of_a_gpu(compensated):
    models = [Model().cuda() for _ in range(2)]
    found = []
    for model, host in zip(models, (False, HostArena())):
        accumulator = headroom.GradAccumulator(model, compensated=compensated, host=host)
        for k in range(4):
            with accumulator.micro_batch():
                x = torch.full((4, 9), float(k), device="cuda")
                model(x, rare=k == 2).square().sum().backward()
        accumulator.finish()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_same_bits(*found)
