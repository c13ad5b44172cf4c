"""retry_on_oom: steps that cannot be repeated, and the errors that say why."""

import re

import headroom
import pytest
import torch
from headroom.retrying import retry_on_oom, training
from headroom.techniques import levels
from torch import nn
from torch._dynamo.testing import CompileCounter

from helpers.failing_allocator import failing_allocator
from helpers.retrying import Failing, assert_same, batch, contents, model_of, said, step_of


def test_gradients_that_the_step_writes_over_itself():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        raise MemoryError("no room")

    model(batch()).square().mean().backward()
    with pytest.raises(MemoryError, match="cannot be repeated.*the gradient of a parameter"):
        retry_on_oom(step, model=model, optimizer=optimizer)(batch())


@pytest.mark.parametrize("kind", [headroom.optim.AdamW, torch.optim.AdamW])
def test_a_failure_behind_the_step_is_not_repeated(kind):
    model = model_of()
    optimizer = kind(model.parameters())
    step = step_of(model, optimizer, after=Failing(MemoryError("no room")))
    before = contents(model)
    with pytest.raises(MemoryError, match="no room\n.*cannot be repeated.*AdamW has stepped"):
        retry_on_oom(step, model=model, optimizer=optimizer)(batch())
    assert not torch.equal(contents(model)[0], before[0]) and model.save == ["L0", "L0"]


@pytest.mark.parametrize("number", [1, 3], ids=["first", "later"])
def test_a_half_done_step_of_an_optimizer_of_torch_is_not_repeated(number):
    """While the same failure in the forward pass is mended."""

    def made():
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        return retry_on_oom(step_of(model, optimizer), model=model, optimizer=optimizer)

    with failing_allocator() as allocator:
        step = made()
        for _ in range(number):
            with allocator.failing_at(0):
                step(batch())
        last = allocator.count
        step = made()
        for _ in range(number - 1):
            step(batch())
        words = "cannot be repeated, since that of AdamW failed half way.*headroom.optim"
        with allocator.failing_at(last - 1), pytest.raises(RuntimeError, match=words):
            step(batch())
        assert step.retries == 0
        with allocator.failing_at(last // 4), pytest.warns(UserWarning, match="L0 to L1"):
            step(batch())
    assert step.retries == 1


def test_an_optimizer_that_runs_the_model_itself_is_not_repeated():
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    fail = Failing(MemoryError("no room"))

    def step(tokens):
        def closure():
            optimizer.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            fail()
            return loss

        optimizer.step(closure)

    step = retry_on_oom(step, model=model, optimizer=optimizer)
    with pytest.raises(MemoryError, match="that of LBFGS failed half way"):
        step(batch())
    step(batch())


@pytest.mark.parametrize("when", ["stepped", "waiting", "preparing"])
def test_gradient_release(when):
    """Once a parameter has been stepped in backward, the step cannot be repeated."""
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    fail, prepare = Failing(MemoryError("no room")), optimizer._prepared_part

    def step(tokens):
        model(tokens).square().mean().backward()
        optimizer.step()

    handle = headroom.release_gradients(
        model, optimizer, bucket_bytes=1 << 22 if when == "waiting" else 0
    )
    if when == "preparing":
        optimizer._prepared_part = lambda *part: fail() or prepare(*part)
    else:
        first = model.blocks[0].attention_norm.weight  # one of the last to get its gradient
        first.register_hook(lambda grad: fail())
    retrying = retry_on_oom(step, model=model, optimizer=optimizer)
    torch.manual_seed(4)
    if when == "stepped":
        with pytest.raises(MemoryError, match="cannot be repeated.*AdamW has stepped"):
            retrying(batch())
        return
    with pytest.warns(UserWarning, match="L0 to L1"):
        retrying(batch())
    handle.remove()
    twin = model_of("L1")
    torch.manual_seed(4)
    step_of(twin, headroom.optim.AdamW(twin.parameters()))(batch())
    assert_same(contents(model), contents(twin))


class Watching(nn.Module):
    """A module with a buffer that is too large to be copied before every step."""

    def __init__(self, writes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("large", torch.zeros(1 << 23, dtype=torch.float32))
        self.register_buffer("small", torch.zeros(1 << 22))  # the largest that is copied
        self.writes = writes

    def forward(self, x):
        self.small += 1
        if self.writes:
            self.large[0] += 1
        return x * self.weight


@pytest.mark.parametrize("writes", [False, True])
def test_large_buffers_are_watched_and_small_ones_restored(writes):
    model = Watching(writes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = retry_on_oom(
        step_of(model, optimizer, Failing(MemoryError("no room"))), model=model, optimizer=optimizer
    )
    words = "cannot be repeated.*buffer large" if writes else "no leaner setting is left"
    with pytest.raises(MemoryError, match=words):
        step(torch.ones(2, 3))
    assert model.small[-3:].tolist() == [1.0 if writes else 0.0] * 3


@pytest.mark.parametrize("kind", [headroom.optim.AdamW, torch.optim.AdamW])
def test_a_compiled_step_of_an_optimizer_is_seen(kind):
    model = model_of()
    optimizer = kind(model.parameters())
    counter, fail = CompileCounter(), Failing()
    compiled = torch.compile(optimizer.step, backend=counter)

    def step(tokens):
        model(tokens).square().mean().backward()
        compiled()
        fail()
        optimizer.zero_grad()

    step = retry_on_oom(step, model=model, optimizer=optimizer)
    for _ in range(3):
        step(batch())
    assert counter.frame_count == 1
    fail.errors = [MemoryError("no room")]
    with pytest.raises(MemoryError, match="cannot be repeated.*AdamW has stepped"):
        step(batch())


def test_two_steps_of_one_optimizer():
    """The second one runs out of memory before it writes, but the first one has written."""
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    fail = Failing()
    optimizer._prepared_count = lambda found_inf: fail() or list  # before it writes
    plain = step_of(model, optimizer)

    def step(tokens):
        plain(tokens)
        fail.errors = [MemoryError("no room")]
        plain(tokens)

    with pytest.raises(MemoryError, match="cannot be repeated.*AdamW has stepped"):
        retry_on_oom(step, model=model, optimizer=optimizer)(batch())


def test_parameters_that_the_step_writes_itself():
    model = model_of()
    blocks = list(model.blocks.parameters())
    optimizer = torch.optim.SGD(blocks, lr=0.1)
    hidden = [headroom.optim.AdamW(model.norm.parameters())]
    fail = Failing()

    def step(what):
        model(batch()).square().mean().backward()
        what()
        fail()
        optimizer.step()

    def write():
        with torch.no_grad():
            blocks[0].clamp_(-1, 1)

    wanted = {
        hidden[0].step: "parameter norm.weight, which none of the optimizers has",
        write: "parameters, which SGD has stepped",
    }
    for what, words in wanted.items():
        fail.errors = [MemoryError("no room")]
        with pytest.raises(MemoryError, match=f"cannot be repeated.*{words}"):
            retry_on_oom(step, model=model, optimizer=optimizer)(what)


class Sized(MemoryError):
    """An error like NumPy's, which is made of other things than a text."""

    def __init__(self, shape, dtype):
        super().__init__(shape, dtype)
        self.shape = shape

    def __str__(self):
        return f"no room for {self.shape}"


def test_an_error_with_arguments_of_its_own():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = Sized((3, 4), "float32")
    step = retry_on_oom(Failing(error), model=model, optimizer=optimizer)
    with pytest.raises(MemoryError, match=r"no room for \(3, 4\)\n.*no leaner") as caught:
        step()
    assert caught.value is error


def test_an_error_while_a_step_is_undone_or_made_leaner(monkeypatch):
    """It does not hide the error of memory."""
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())

    def broken(*_):
        raise ValueError("something else")

    for owner, name, words in (
        (training.BeforeTraining, "restore", "may be half changed: ValueError: something else"),
        (levels.RaisedLevels, "_set", "may be half changed: ValueError: something else"),
    ):
        fail = Failing(MemoryError("no room"))
        step = retry_on_oom(step_of(model, optimizer, fail), model=model, optimizer=optimizer)
        with monkeypatch.context() as patched, pytest.raises(MemoryError) as caught:
            patched.setattr(owner, name, broken)
            step(batch())
        assert re.search(f"no room\n.*{words}", said(caught.value))


@pytest.mark.parametrize("layer", [nn.LazyLinear(3), nn.LazyBatchNorm1d()])
def test_a_lazy_module_gets_its_parameters_once(layer):
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fail = Failing(MemoryError("no room"))
    step = retry_on_oom(step_of(model, optimizer, fail), model=model, optimizer=optimizer)
    with pytest.raises(MemoryError, match="cannot be repeated, since it has changed"):
        step(torch.randn(4, 2))
    step(torch.randn(4, 2))
