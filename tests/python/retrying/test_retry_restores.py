"""retry_on_oom: what it restores, and what it leaves of a failed attempt."""

import cProfile
import gc
import pstats
import random
import weakref

import headroom
import pytest
import torch
from headroom.retrying import retry_on_oom
from torch import nn

from helpers.failing_allocator import failing_allocator
from helpers.retrying import CPU_ERROR, Failing, batch, model_of, step_of


def test_nothing_of_the_failed_attempt_is_alive_when_the_step_is_repeated():
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    seen = []

    def step(tokens):
        logits = model(tokens)
        alive = [one for one in seen if one() is not None]
        seen.append(weakref.ref(logits))
        if len(seen) == 1:
            try:
                raise MemoryError("inner")
            except MemoryError as error:
                logits.cycle = [logits]  # what only a collection frees
                raise RuntimeError(CPU_ERROR) from error
        assert not alive

    gc.disable()
    try:
        with pytest.warns(UserWarning):
            retry_on_oom(step, model=model, optimizer=optimizer)(batch())
    finally:
        gc.enable()
    assert len(seen) == 2


def test_copies_for_the_failed_attempt_are_gone_when_the_step_is_repeated():
    """Here those of gradients that were there before it, to which the failed backward has added."""
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    fail, live = Failing(), []

    def step(tokens):
        live.append(allocator.live(collects=False))
        model(tokens).square().mean().backward()
        fail()

    step = retry_on_oom(step, model=model, optimizer=optimizer)
    with failing_allocator() as allocator:
        for _ in range(2):
            step(batch())
        fail.errors = [MemoryError("no room")]
        gc.collect()
        gc.disable()
        try:
            with pytest.warns(UserWarning):
                step(batch())
        finally:
            gc.enable()
    assert step.retries == 1 and live[3] <= live[2]


class Kept(torch.autograd.Function):
    """Keeps an object as long as its graph."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_what_a_failed_backward_was_about_to_run_is_gone_when_the_step_is_repeated():
    """A node whose gradient is there waits in a queue while a hook on a parameter raises."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs, alive, fail = [], [], Failing(MemoryError("no room"))
    model[1].weight.register_post_accumulate_grad_hook(lambda param: fail())

    def step(x):
        alive.append([one() is not None for one in graphs])
        value = Failing()
        graphs.append(weakref.ref(value))
        loss = model[1](Kept.apply(model[0](x), value)).sum()
        del value
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step = retry_on_oom(step, model=model, optimizer=optimizer)
    step._reduce_memory = lambda: "again"
    with pytest.warns(UserWarning, match="again"):
        step(torch.randn(7, 5))
    assert alive == [[], [False]]


def test_a_step_that_does_not_fail_takes_little_for_each_module():
    """In calls of functions, which are the same on every machine."""

    def calls(count):
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(3)) for _ in range(count)))
        optimizer = headroom.optim.AdamW(model.parameters())
        step = retry_on_oom(lambda: None, model=model, optimizer=optimizer)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)  # of the step before
        step()
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
        return pstats.Stats(profile).total_calls

    assert calls(60) - calls(20) <= 40 * 100  # two modules and two parameters each


@pytest.mark.parametrize("drops", ["to None", "to zeros", "not"])
def test_gradients_from_before_the_step(drops):
    """Of the step before, which are dropped first, or of an accumulation over calls."""

    def made(fail):
        model = model_of("L1")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.norm.weight.requires_grad_(False)

        def step(tokens):
            if drops != "not":
                optimizer.zero_grad(set_to_none=drops == "to None")
            model(tokens).square().mean().backward()
            fail()

        torch.manual_seed(4)
        return model, optimizer, step

    fail = Failing()
    model, optimizer, step = made(fail)
    step = retry_on_oom(step, model=model, optimizer=optimizer)
    step(batch(3))
    kept = [p.grad for p in model.parameters()]
    fail.errors = [MemoryError()]
    with pytest.warns(UserWarning):
        step(batch())
    got = [p.grad for p in model.parameters()]
    if drops == "not":
        assert all(a is b for a, b in zip(got, kept))  # the same tensors, with more in them
    twin, _, plain = made(lambda: None)
    plain(batch(3))
    plain(batch())
    for param, other in zip(model.parameters(), twin.parameters()):
        assert (param.grad is None) == (other.grad is None)
        assert param.grad is None or torch.equal(param.grad, other.grad)


def test_an_accumulator_with_sums_from_before():
    def made(fail):
        model = model_of("L1")
        accumulator = headroom.GradAccumulator(model)

        def step(tokens):
            for part in tokens.chunk(2):
                with accumulator.micro_batch(weight=len(part)):
                    model(part).square().mean().backward()
            fail()

        torch.manual_seed(4)
        return model, accumulator, step

    fail = Failing()
    model, accumulator, step = made(fail)
    optimizer = headroom.optim.AdamW(model.parameters())
    step = retry_on_oom(step, model=model, optimizer=optimizer, accumulator=accumulator)
    step(batch(3))
    fail.errors = [MemoryError()]
    with pytest.warns(UserWarning):
        step(batch())
    twin, other, plain = made(lambda: None)
    plain(batch(3))
    plain(batch())
    accumulator.finish(), other.finish()
    for param, same in zip(model.parameters(), twin.parameters()):
        assert torch.equal(param.grad, same.grad)


def test_what_is_set_on_an_optimizer_for_a_step():
    """A scale from before the step stays; one that the step has set is gone."""
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    scale = optimizer.grad_scale = torch.tensor(8.0)
    fail, seen = Failing(MemoryError("no room")), []

    def step(tokens):
        seen.append(vars(optimizer).get("found_inf"))
        optimizer.found_inf = torch.zeros(())
        step_of(model, optimizer, fail)(tokens)

    with pytest.warns(UserWarning, match="L0 to L1"):
        retry_on_oom(step, model=model, optimizer=optimizer)(batch())
    assert optimizer.grad_scale is scale and seen == [None, None]


def test_generators_are_restored_with_no_leaner_setting():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        random.random()
        torch.rand(1)
        raise MemoryError("no room")

    state = random.getstate(), torch.get_rng_state()
    with pytest.raises(MemoryError, match="no leaner setting"):
        retry_on_oom(step, model=model, optimizer=optimizer)()
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


class Recurrent(nn.Module):
    """A module with attributes and buffers of all kinds that a forward pass changes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.count, self.state, self.loss = 0, torch.zeros(3), None
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("absent", None)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        with torch.inference_mode():
            self.register_buffer("frozen", torch.ones(3))

    def forward(self, x):
        self.count += 1
        self.grown = torch.zeros(2 + self.count)
        self.state = self.state + self.count
        if self.absent is None:
            self.absent = torch.ones(3)
            self.register_buffer("cached", torch.ones(3))
            self.is_cached = True
        else:
            self.cached += 1
        self.loss = ((self.adjacency @ x.T).T * self.weight * self.frozen.clone()).sum()
        return self.loss + self.state.sum()


def test_attributes_and_buffers_of_modules():
    model, seen = Recurrent(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x)
        loss.backward()
        seen.append((model.count, model.state.tolist(), len(model.grown), model.cached.tolist()))
        graphs.append(weakref.ref(model.loss))
        del loss
        fail()
        optimizer.step()
        optimizer.zero_grad()

    fail, graphs = Failing(MemoryError("first")), []
    step = retry_on_oom(step, model=model, optimizer=optimizer)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no leaner setting"):
            step(torch.ones(2, 3))
        assert (model.count, model.state.tolist(), len(model.grown)) == (0, [0.0] * 3, 2)
        assert model.absent is None and model.loss is None and graphs[-1]() is None
        assert not hasattr(model, "cached") and not hasattr(model, "is_cached")
        assert "cached" not in model.state_dict()
        fail.errors = [MemoryError("second")]
    fail.errors = []
    step(torch.ones(2, 3))
    assert seen == [(1, [1.0] * 3, 3, [1.0] * 3)] * 3
    fail.errors = [MemoryError("third")]
    with pytest.raises(MemoryError, match="no leaner setting"):
        step(torch.ones(2, 3))
    assert (model.count, model.cached.tolist(), model.is_cached) == (1, [1.0] * 3, True)
    assert model.loss is None  # the result of the step before it is not kept alive


def test_sparse_gradients():
    def made(fail):
        torch.manual_seed(1)
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

        def step(indices, ends):
            model(indices).square().sum().backward()
            fail()
            if ends:
                optimizer.step()
                optimizer.zero_grad()

        return model, optimizer, step

    fail = Failing()
    model, optimizer, step = made(fail)
    step = retry_on_oom(step, model=model, optimizer=optimizer, micro_batches=1)
    step._reduce_memory = lambda: "again"
    twin, _, plain = made(lambda: None)
    for ends in (False, True, False):
        fail.errors = [MemoryError()]
        with pytest.warns(UserWarning, match="again"):
            step(torch.tensor([1, 3]), ends)
        plain(torch.tensor([1, 3]), ends)
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.weight.grad.to_dense(), twin.weight.grad.to_dense())
