"""retry_on_oom: what it takes, and which errors it catches."""

import functools
import os

import headroom
import pytest
import torch
from headroom.retrying import RetryingStep, retry, retry_on_oom
from torch import nn

from helpers.retrying import CPU_ERROR, Failing, batch, model_of, step_of

ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory."),
    "python": MemoryError(),
    "cpu": RuntimeError(f"{CPU_ERROR}\nand more of it"),
    "c++": RuntimeError("std::bad_alloc"),
    "runtime": RuntimeError("CUDA error: out of memory"),
    "library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_errors_that_are_retried(error):
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    step = retry_on_oom(step_of(model, optimizer, Failing(error)), model=model, optimizer=optimizer)
    with pytest.warns(UserWarning) as warned:
        step(batch())
    assert model.save == ["L1", "L1"] and step.retries == 1
    said, change = str(error).partition("\n")[0] or "MemoryError", "2 blocks raised from L0 to L1"
    assert step.history == [(1, said, change)]
    words = f"step 1 ran out of memory and is repeated: {change}. {said}"
    assert [str(one.message) for one in warned] == [words] and warned[0].filename == __file__
    step(batch())
    assert step.report() == f"1 of 3 attempts were repeated\n  step 1: {change} ({said})"
    assert isinstance(step, RetryingStep) and step.__name__ == "step"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), ValueError("x"), KeyboardInterrupt()]
)
def test_other_errors_pass_at_once(error):
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    step = retry_on_oom(step_of(model, optimizer, Failing(error)), model=model, optimizer=optimizer)
    with pytest.raises(type(error)) as caught:
        step(batch())
    assert caught.value is error and step.retries == 0 and model.save == ["L0", "L0"]


def test_a_decorator():
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    fail = Failing(MemoryError())

    @retry_on_oom(model=model, optimizer=[optimizer])
    def step(tokens):
        """A step."""
        return step_of(model, optimizer, fail)(tokens)

    with pytest.warns(UserWarning, match="L0 to L1"):
        step(batch())
    assert step.__doc__ == "A step."


def test_arguments_that_do_not_fit():
    model = model_of()
    given = dict(model=model, optimizer=headroom.optim.AdamW(model.parameters()))
    wrong = [
        (dict(step=3), TypeError, "wanted a function"),
        (dict(model=None), TypeError, "needs model= and optimizer="),
        (dict(model=3), TypeError, "model is 3"),
        (dict(optimizer="adam"), TypeError, "optimizer is 'adam'"),
        (dict(scaler=3), TypeError, "scaler is 3"),
        (dict(accumulator=3), TypeError, "accumulator is 3"),
        (dict(micro_batches=0), ValueError, "micro_batches is 0"),
        (dict(micro_batches=2.0), TypeError, "micro_batches is 2.0"),
        (dict(micro_batches=True), TypeError, "micro_batches is True"),
        (dict(optimizer=None), TypeError, "needs model= and optimizer="),
    ]
    for change, kind, words in wrong:
        with pytest.raises(kind, match=words):
            retry_on_oom(**(given | dict(step=lambda batch: None) | change))


def refused(rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = step_of(model, optimizer)
    with pytest.raises(RuntimeError, match="2 ranks train"):
        retry_on_oom(plain, model=model, optimizer=optimizer)(torch.ones(3, 2))
    plain(torch.ones(3, 2))  # nothing has begun that others would wait for


@pytest.mark.gloo
def test_several_ranks_are_refused(ranks):
    ranks(refused)


def test_one_rank_is_none_of_several(monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        step = retry_on_oom(step_of(model, optimizer), model=model, optimizer=optimizer)
        step(torch.ones(3, 2))
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
        with pytest.raises(RuntimeError, match="2 ranks train"):
            step(torch.ones(3, 2))
    finally:
        torch.distributed.destroy_process_group()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as accelerate has them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


def test_wrapped_optimizers_are_those_in_them():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = Wrapper(Wrapper(optimizer))
    fail = Failing()

    def step(tokens):
        model(tokens).square().mean().backward()
        wrapped.step()
        fail()
        optimizer.zero_grad()

    for given in (wrapped, optimizer, (wrapped,)):
        retrying = retry_on_oom(step, model=model, optimizer=given)
        retrying(batch())
        fail.errors = [MemoryError("no room")]
        with pytest.raises(MemoryError, match="cannot be repeated.*AdamW has stepped"):
            retrying(batch())


def test_the_capture_of_a_graph_runs_the_step_as_it_is(monkeypatch):
    monkeypatch.setattr(retry, "is_capturing", lambda: True)
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    error = MemoryError("in the capture")
    step = retry_on_oom(step_of(model, optimizer, Failing(error)), model=model, optimizer=optimizer)
    with pytest.raises(MemoryError) as caught:
        step(batch())
    assert caught.value is error and step.retries == 0


class Owner:
    """A step as a method, of an object that has more than it says."""

    def __init__(self):
        self.model = model_of()
        self.optimizer = headroom.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu")
        self.batches = iter([])

    def scaled(self):
        self.scaler.scale(self.model(batch()).mean()).backward()

    def __call__(self):
        self.scaled()


GLOBAL = headroom.GradAccumulator(nn.Linear(2, 2))


def test_what_a_step_uses_and_was_not_given_is_refused():
    owner = Owner()
    model, optimizer, batches = owner.model, owner.optimizer, (one for one in [batch()])
    other, log = torch.optim.SGD(model.parameters()), open(os.devnull)  # a file is an iterator too

    def stepping():
        [optimizer.step() for optimizer in (other,)]

    def accumulating(part):
        GLOBAL.micro_batch()

    refused = {
        owner.scaled: "uses self.scaler, .* give it as scaler=",
        owner: "uses self.scaler",
        (lambda: next(batches)): "uses batches, an iterator",
        stepping: "uses other, .* give it as optimizer=",
        functools.partial(accumulating, 3): "uses GLOBAL, .* give it as accumulator=",
    }
    for step, words in refused.items():
        step = retry_on_oom(step, model=model, optimizer=optimizer)
        for _ in range(2):
            with pytest.raises(TypeError, match=words):
                step()
    given = {"optimizer": [optimizer, other], "scaler": owner.scaler}
    retry_on_oom(owner.scaled, model=model, **given)()
    retry_on_oom(lambda: log.read(), model=model, optimizer=optimizer)()
    log.close()


def test_a_variable_that_has_no_value_yet():
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())

    def step():
        nonlocal seen
        seen = optimizer

    if model is None:
        seen = None
    retry_on_oom(step, model=model, optimizer=optimizer)()
    assert seen is optimizer
