"""retry_on_oom: what it takes, what it restores, and what it refuses to repeat."""

import gc
import random
import warnings
import weakref

import headroom
import pytest
import torch
from headroom.fitting.retry import RetryingStep, retry_on_oom
from torch import nn

from helpers.failing_allocator import failing_allocator

CPU_ERROR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
ERRORS = [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(CPU_ERROR)]


def model_of(save="L0", layers=2):
    torch.manual_seed(1)
    config = headroom.nn.TransformerConfig(
        vocab_size=11, hidden_size=8, layers=layers, heads=2, features=12, dropout=0.2
    )
    return headroom.nn.Transformer(config, save=save)


def batch(rows=2):
    return torch.randint(11, (rows, 7), generator=torch.Generator().manual_seed(rows))


class Failing:
    """Raises errors at a place of a step, one in each call until none is left."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)


def step_of(model, optimizer, fail=lambda: None, after=lambda: None):
    def step(tokens):
        loss = model(tokens).square().mean()
        loss.backward()
        fail()
        optimizer.step()
        after()
        optimizer.zero_grad()
        return loss.detach()

    return step


def contents(model):
    found = [*model.parameters(), *model.buffers()]
    return [x.detach().clone() for x in found] + [torch.get_rng_state()]


def assert_same(got, wanted):
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "python", "cpu"])
def test_errors_that_are_retried(error):
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    step = retry_on_oom(step_of(model, optimizer, Failing(error)), model=model, optimizer=optimizer)
    with pytest.warns(UserWarning, match="step 1 ran out of memory .* raised from L0 to L1"):
        step(batch())
    assert model.save == ["L1", "L1"] and step.retries == 1
    assert [one.step for one in step.history] == [1]
    assert "1 of 2 attempts" in step.report() and "2 blocks raised from L0 to L1" in step.report()
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


def test_levels_rise_one_after_another_and_then_the_error_comes():
    model = model_of()
    model.save = ["L0", "L3"]
    optimizer = headroom.optim.AdamW(model.parameters())
    errors = Failing(*(torch.OutOfMemoryError("no room") for _ in range(9)))
    # The last of what an optimizer does before it writes, when it has made its states.
    optimizer._prepared_count = lambda found_inf: errors() or list
    step = retry_on_oom(step_of(model, optimizer), model=model, optimizer=optimizer)
    before = contents(model)
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError) as caught:
        warnings.simplefilter("ignore", UserWarning)
        step(batch())
    assert "no room" in str(caught.value) and "no leaner setting is left" in str(caught.value)
    assert [one.change for one in step.history] == [
        "1 blocks raised from L0 to L1",
        "1 blocks raised from L1 to L2",
        "1 blocks raised from L2 to L3",
        "2 blocks raised from L3 to L4",
        "2 blocks raised from L4 to L5",
    ]
    assert_same(contents(model), before)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


class Trainer:
    """An object with settings of its own."""

    def __init__(self, model, fail):
        self.model, self.fail = model, fail
        self.optimizer = headroom.optim.AdamW(model.parameters())
        self.choice = "roomy"

    def leaner(self):
        if self.choice == "lean":
            return False
        self.choice = "lean"
        return True

    def step(self, tokens):
        return step_of(self.model, self.optimizer, self.fail)(tokens), self.choice


def test_a_method_of_an_object_with_settings():
    trainer = Trainer(model_of(), Failing(MemoryError("first")))
    step = retry_on_oom(trainer.step)
    with pytest.warns(UserWarning, match="roomy became lean"):
        assert step(batch())[1] == "lean"
    trainer.fail.errors = [MemoryError("second")]
    with pytest.raises(MemoryError, match="no leaner setting"):
        step(batch())
    with pytest.raises(TypeError, match="optimizer is given"):
        retry_on_oom(trainer.step, optimizer=trainer.optimizer)


def test_micro_batches_after_the_levels():
    model, twin = model_of("L5"), model_of("L5")
    asked = []

    def made(model, fail):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens, micro_batches=1):
            asked.append(micro_batches)
            for part in tokens.chunk(micro_batches):
                (model(part).square().mean() / micro_batches).backward()
            fail()
            optimizer.step()
            optimizer.zero_grad()

        return step, optimizer

    step, optimizer = made(model, Failing(MemoryError(), MemoryError()))
    step = retry_on_oom(step, model=model, optimizer=optimizer, micro_batches=4)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="micro-batches: 2 before, 4 now"):
        step(batch(4))
    step(batch(4))
    assert asked == [1, 2, 4, 4]
    plain, _ = made(twin, lambda: None)
    torch.manual_seed(3)
    for _ in range(2):
        plain(batch(4), micro_batches=4)
    assert_same(contents(model), contents(twin))


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
        (dict(micro_batches=2), TypeError, "keyword argument"),
    ]
    for change, kind, words in wrong:
        with pytest.raises(kind, match=words):
            retry_on_oom(**(given | dict(step=lambda batch: None) | change))


def test_several_ranks_are_refused(monkeypatch):
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    step = retry_on_oom(step_of(model, optimizer), model=model, optimizer=optimizer)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="2 ranks train"):
        step(batch())


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


# ---- gradients that were there before -----------------------------------------------------------


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


def test_gradients_that_the_step_writes_over_itself():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        raise MemoryError("no room")

    model(batch()).square().mean().backward()
    with pytest.raises(MemoryError, match="cannot be repeated.*the gradient of a parameter"):
        retry_on_oom(step, model=model, optimizer=optimizer)(batch())


# ---- what cannot be repeated --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [headroom.optim.AdamW, torch.optim.AdamW])
def test_a_failure_behind_the_step_is_not_repeated(kind):
    model = model_of()
    optimizer = kind(model.parameters())
    step = step_of(model, optimizer, after=Failing(MemoryError("no room")))
    before = contents(model)
    with pytest.raises(MemoryError, match="no room\n.*cannot be repeated.*AdamW has stepped"):
        retry_on_oom(step, model=model, optimizer=optimizer)(batch())
    assert not torch.equal(contents(model)[0], before[0]) and model.save == ["L0", "L0"]


def test_a_half_done_step_without_copies_is_not_repeated():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    plain = step_of(model, optimizer)
    step, tokens = retry_on_oom(plain, model=model, optimizer=optimizer, undo=False), batch()
    with failing_allocator() as allocator:
        for _ in range(2):
            with allocator.failing_at(0):
                step(tokens)
        last = allocator.count  # of a step whose states exist
        with allocator.failing_at(last - 1), pytest.raises(RuntimeError, match="may be half done"):
            step(tokens)


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 22], ids=["stepped", "waiting"])
def test_gradient_release(bucket_bytes):
    """Once a parameter has been stepped in backward, the step cannot be repeated."""
    model = model_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    fail = Failing(MemoryError("no room"))

    def step(tokens):
        model(tokens).square().mean().backward()
        optimizer.step()

    handle = headroom.optim.release_gradients(model, optimizer, bucket_bytes=bucket_bytes)
    first = model.blocks[0].attention_norm.weight  # one of the last to get its gradient
    first.register_hook(lambda grad: fail())
    retrying = retry_on_oom(step, model=model, optimizer=optimizer)
    torch.manual_seed(4)
    if bucket_bytes == 0:
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
        self.register_buffer("small", torch.zeros(3))
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
    assert model.small.tolist() == [1.0 if writes else 0.0] * 3


# ---- scalers and accumulators -------------------------------------------------------------------


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "headroom"])
@pytest.mark.parametrize("scaler_of", [torch.amp.GradScaler, headroom.amp.GradScaler])
def test_scalers(ours, scaler_of):
    """A failure at any allocation is repeated, or comes after the optimizer's step, and says so."""

    def made(save):
        model = model_of(save, layers=1)
        kind = headroom.optim.AdamW if ours else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.01)
        scaler = scaler_of("cpu", init_scale=8.0, growth_interval=1)

        def step(tokens):
            scaler.scale(model(tokens).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        torch.manual_seed(4)
        return model, step, dict(optimizer=optimizer, scaler=scaler)

    def state(model, parts):
        entries = parts["optimizer"].state_dict()["state"].values()
        values = [value.clone() for entry in entries for value in entry.values()]
        numbers = torch.tensor(list(parts["scaler"].state_dict().values()))
        return [*contents(model), *values, numbers]

    model, step, parts = made("L1")
    tokens = batch()
    for _ in range(2):
        step(tokens)
    wanted, late, repeated, number = state(model, parts), 0, 0, 1
    with failing_allocator() as allocator, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        while True:
            model, step, parts = made("L0")
            step = retry_on_oom(step, model=model, **parts)
            step(tokens)
            try:
                with allocator.failing_at(number):
                    step(tokens)
                assert_same(state(model, parts), wanted)
                repeated += step.retries
            except RuntimeError as error:
                late += 1
                assert "AdamW has stepped" in str(error)
                assert_same(state(model, parts)[:-1], wanted[:-1])
            if allocator.count < number:
                break
            number += 5
    assert repeated > 10 and late <= 2


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


# ---- models that were patched, or were not ------------------------------------------------------


@pytest.mark.parametrize("patched", [None, {}, {"norms": False, "glu": False}])
def test_a_model_of_transformers(patched):
    """Its levels rise, and what else it was patched with stays."""
    from helpers.hf_models import inputs_of, model_of

    def trained(fail, save):
        model = model_of("Llama")
        if patched is not None:
            headroom.patch(model, save=save, **patched)
        elif save != "L0":
            headroom.patch(model, save=save, norms=False, glu=False, rope=False)
        optimizer = headroom.optim.AdamW(model.parameters(), lr=0.01)

        def plain():
            model(**inputs_of()).loss.backward()
            fail()
            optimizer.step()
            optimizer.zero_grad()

        step = retry_on_oom(plain, model=model, optimizer=optimizer)
        for k in range(3):
            if k == 1:
                fail.errors = fail.later
            step()
        return model, step

    fail, none = Failing(), Failing()
    fail.later, none.later = [MemoryError(), MemoryError()], []
    with pytest.warns(UserWarning, match="L1 to L2"):
        model, step = trained(fail, "L0")
    twin, _ = trained(none, "L2")
    assert step.retries == 2
    assert_same(contents(model), contents(twin))


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_with_little_memory():
    """The allocator is held to what a step takes at L4: at L0 it runs out of memory."""

    def made(save):
        torch.manual_seed(1)
        config = headroom.nn.TransformerConfig(
            vocab_size=512, hidden_size=256, layers=8, heads=4, features=1024, dropout=0.1
        )
        model = headroom.nn.Transformer(config, save=save, device="cuda")
        optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(4)
        return model, optimizer, step_of(model, optimizer)

    tokens = torch.randint(512, (8, 1024), device="cuda")
    state, peak = {}, 0
    for save in ("L4", "L0"):
        model, optimizer, plain = made(save)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if save == "L0":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((peak + (64 << 20)) / total)
        try:
            step = retry_on_oom(plain, model=model, optimizer=optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                losses = [step(tokens) for _ in range(3)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        peak = torch.cuda.max_memory_reserved()
        state[save] = [x.cpu() for x in losses + contents(model)] + [torch.cuda.get_rng_state()]
        del model, optimizer, plain
    assert step.retries >= 1, step.report()
    assert_same(state["L0"], state["L4"])
