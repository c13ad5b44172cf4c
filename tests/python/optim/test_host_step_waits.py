"""Each wait of a step on the host is needed: without it, a copy engine and a thread that do what
they may give other bits, or see memory that is written while it is copied."""

import gc
from functools import partial

import headroom
import pytest
import torch
from headroom.host import cutting
from headroom.optim import AdamW8bit
from headroom.param_states.paging.pipeline import Pipeline
from headroom.param_states.paging.written import WrittenWeights

from helpers import modes
from helpers.bits import same_bits
from helpers.copies import adversary, copying_with, hosted_step, stepping_on
from helpers.rewritten import rewritten

POLICIES = ["late", "eager", "up", "down"]
HOST = ["late", "eager"]


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch):
    monkeypatch.setattr(cutting, "CUT", 512)


# ---- what notices -------------------------------------------------------------------------------


def begun(limit=None):
    model = modes.build(torch.bfloat16)
    options = {"lr": 1e-2, "min_8bit_size": 64, "master": "remainder16", "max_grad_norm": limit}
    return model, AdamW8bit(model.parameters(), **options)


def of_each(model, optimizer):
    """Returns the weights of each parameter with its state."""
    states = optimizer.state_dict()["state"]
    return [
        [param.detach().clone(), *(x.clone() for _, x in sorted(states[i].items()))]
        for i, param in enumerate(model.parameters())
    ]


def contents(model, optimizer):
    return [x for one in of_each(model, optimizer) for x in one]


_wanted = {}


def wanted(key, make):
    if key not in _wanted:
        _wanted[key] = make()
    return _wanted[key]


def assert_equal(found, others):
    assert len(found) == len(others) and all(map(same_bits, found, others))


def ordinary(steps):
    def make():
        model, optimizer = begun()
        modes.train(model, optimizer, range(steps))
        return contents(model, optimizer)

    return wanted(("ordinary", steps), make)


def steps(engine):
    """Steps that clip, with weights that are written from outside between two of them."""
    runs = []
    for on_host in (False, True):
        model, optimizer = begun(17.0)
        if on_host:
            hosted_step(optimizer)
        for step in range(4):
            modes.train(model, optimizer, [step])
            if step == 1:
                model.mix.data.mul_(0.5)
        runs.append(contents(model, optimizer))
    assert_equal(*runs)


def runs_behind_the_device(engine):
    """A step that is called while the device still computes gradients, and reads weights."""
    model, optimizer = begun()
    hosted_step(optimizer)
    modes.train(model, optimizer, range(2))
    optimizer.zero_grad()
    modes.loss_of(model, modes.batch(2)).backward()
    params = list(model.parameters())
    grads = [param.grad.clone() for param in params]
    weights = [param.detach().clone() for param in params]
    read = []

    def computes():
        read.extend(param.detach().clone() for param in params)
        for param, grad in zip(params, grads):
            param.grad.copy_(grad)

    for param in params:
        param.grad = torch.full_like(param, 7)  # laid out as it is: nothing copies it before
    engine.compute(computes)
    optimizer.step()
    assert_equal(read, weights)
    assert_equal(contents(model, optimizer), ordinary(3))


def releases(engine):
    """Steps beside the backward pass that are clipped, and some that are not."""
    runs = []
    for on_host in (False, True):
        model, optimizer = begun(17.0)
        if on_host:
            hosted_step(optimizer)
        clip = None if on_host else "two-pass"
        handle = headroom.release_gradients(model, optimizer, clip=clip, bucket_bytes=2000)
        for step in range(4):
            if not on_host:
                with handle.measure():
                    modes.loss_of(model, modes.batch(step)).backward()
            modes.loss_of(model, modes.batch(step)).backward()
            optimizer.step()
            engine.finish_compute()
        runs.append(contents(model, optimizer))
        handle.remove()
    assert_equal(*runs)


def releases_behind_the_device(engine):
    """Gradients that the device computes, and weights that it reads, while the backward pass goes
    on."""
    model, optimizer = begun()
    hosting = hosted_step(optimizer, bucket_bytes=1 << 16)
    modes.train(model, optimizer, range(2))
    handle = headroom.release_gradients(model, optimizer, bucket_bytes=2000)
    prepared, put = optimizer._prepared_part, hosting._put
    read, weights = [], []

    def read_after(turn, part, step):
        """Has begun a step, whose weights have not gone up yet."""
        put(turn, part, step)
        weights.extend(local.clone() for local in part.written)
        engine.compute(lambda: read.extend(local.clone() for local in part.written))

    def late(index, params, scalars):
        for param in params:
            grad, param.grad = param.grad, torch.full_like(param, 7)
            engine.compute(partial(param.grad.copy_, grad))
        return prepared(index, params, scalars)

    optimizer._prepared_part, hosting._put = late, read_after
    optimizer.zero_grad()
    modes.loss_of(model, modes.batch(2)).backward()
    optimizer.step()
    engine.finish_compute()
    assert_equal(read, weights)
    assert_equal(contents(model, optimizer), ordinary(3))
    handle.remove()


def forgets(engine):
    """A release that ends with gradients on their way to where they wait."""
    model, optimizer = begun(17.0)
    hosted_step(optimizer)
    handle = headroom.release_gradients(model, optimizer, bucket_bytes=2000)
    modes.loss_of(model, modes.batch(0)).backward()
    handle.remove()
    assert not any(work.copy for work in engine.queues["down"])


def is_freed(engine):
    """An optimizer that is dropped right after a step."""
    model, optimizer = begun()
    hosted_step(optimizer)
    step = type(optimizer)._step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer), "_step", lambda *_: None)  # which would end all copies
        modes.train(model, optimizer, [0])
    modes.loss_of(model, modes.batch(0)).backward()
    hosting = optimizer._paging
    inner = engine.finish_compute
    engine.finish_compute = lambda: None
    step(optimizer, None)
    engine.finish_compute = inner
    del hosting
    optimizer.offload_handle.wait()
    assert not any(work.copy for queue in ("up", "down") for work in engine.queues[queue])


def fails(engine):
    """A step whose third part raises while copies are on their way."""
    model, optimizer = begun()
    hosting = hosted_step(optimizer, bucket_bytes=2000)
    modes.train(model, optimizer, range(2))
    submit, count = hosting._pipeline.executor.submit, iter(range(100))

    def refusing(*args):
        if next(count) == 2:
            raise RuntimeError("no more")
        return submit(*args)

    hosting._pipeline.executor.submit = refusing
    with pytest.raises(RuntimeError, match="no more"):
        modes.train(model, optimizer, range(2, 3))
    assert not any(work.copy for work in engine.queues["down"])
    hosting._pipeline.executor.shutdown()  # what nobody has waited for is done later
    engine.finish_compute()
    weights = [p.detach().clone() for p in model.parameters()]  # as the next pass reads them
    found = of_each(model, optimizer)
    assert_equal([now[0] for now in found], weights)
    for now, was, will in zip(found, of_each(*_trained(2)), of_each(*_trained(3))):
        is_cut = now[0].numel() > 512
        assert is_cut or any(all(map(same_bits, now, other)) for other in (was, will))
    hosting._pipeline.executor.submit = submit


def _trained(steps):
    model, optimizer = begun()
    modes.train(model, optimizer, range(steps))
    return model, optimizer


SCENARIOS = (
    steps,
    runs_behind_the_device,
    releases,
    releases_behind_the_device,
    forgets,
    is_freed,
    fails,
)


WAITS = {  # where, what it says, what it says without the wait, and what notices
    "a slot is free before gradients go there": (
        Pipeline.put,
        "while part.slot is not None and part.slot.user is not None:",
        "while False:",
        steps,
    ),
    "gradients are there before they go down": (
        Pipeline.put,
        "after = [engine.mark()]",
        "after = []",
        releases_behind_the_device,
    ),
    "weights are compared before the flags go down": (
        WrittenWeights.check,
        "differs, [engine.mark()])",
        "differs, [])",
        steps,
    ),
    "gradients have gone down before the step": (
        Pipeline._stepped,
        "turn.engine.sync(task.ticket)",
        "pass",
        steps,
    ),
    "a part is stepped before its weights go up": (
        Pipeline._retire,
        "task.future.result()",
        "pass",
        steps,
    ),
    "weights are read before others go up": (
        Pipeline._commit,
        "after, ticket = [engine.mark()], None",
        "after, ticket = [], None",
        releases_behind_the_device,
    ),
    "weights have gone up before the next pass": (
        Pipeline.finish,
        "engine.wait(ticket)",
        "pass",
        steps,
    ),
    "weights have gone up before their memory is freed": (
        Pipeline._commit,
        "turn.homes[at].written = ticket",
        "pass",
        is_freed,
    ),
    "weights have gone up after an error": (
        Pipeline.abandon,
        "engine.wait(ticket)",
        "pass",
        fails,
    ),
    "steps have been made after an error": (
        Pipeline.abandon,
        "_has_stepped(task)",
        "task.future.done()",
        fails,
    ),
    "a copy has ended before an error frees its memory": (
        Pipeline.put,
        "engine.sync(ticket)",
        "pass",
        fails,
    ),
    "scalars go down once": (Pipeline.put, "turn.packed = None", "pass", steps),
    "gradients that are forgotten have gone down": (
        Pipeline.discard,
        "task.turn.engine.sync(task.ticket)",
        "pass",
        forgets,
    ),
}


def remove(monkeypatch, wait):
    method, old, new, _ = WAITS[wait]
    owner = {kind.__name__: kind for kind in (Pipeline, WrittenWeights)}
    kind, name = method.__qualname__.split(".")
    rewritten(monkeypatch, owner[kind], name, old, new)


def run(scenario, policy, thread):
    with copying_with(adversary(policy)) as engine, stepping_on(thread):
        scenario(engine)
        gc.collect()


@pytest.mark.parametrize("thread", HOST)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_with_all_waits(scenario, policy, thread):
    run(scenario, policy, thread)


def notices(wait):
    """Returns the first order of copies and steps that shows that a wait is missing."""
    ordinary(3)
    scenario = WAITS[wait][-1]
    for policy in POLICIES:
        for thread in HOST:
            with pytest.MonkeyPatch.context() as patch:
                remove(patch, wait)
                patch.setattr(cutting, "CUT", 512)
                try:
                    run(scenario, policy, thread)
                except (AssertionError, RuntimeError, AttributeError):
                    return policy, thread
    return None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("wait", WAITS)
def test_without_one(wait):
    assert notices(wait) is not None
