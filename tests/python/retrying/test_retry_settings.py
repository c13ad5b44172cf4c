"""retry_on_oom: which settings it takes, one after another."""

import warnings

import headroom
import pytest
import torch
from headroom.retrying import retry_on_oom
from torch import nn

from helpers.retrying import Failing, assert_same, batch, contents, model_of, said, step_of


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
    assert "no leaner setting is left" in said(caught.value)
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

    def reduce_memory(self):
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
    with pytest.raises(TypeError, match="optimizer is given, but Trainer, whose method"):
        retry_on_oom(trainer.step, optimizer=trainer.optimizer)
    with pytest.raises(TypeError, match="micro_batches is given"):
        retry_on_oom(trainer.step, micro_batches=2)


class Unnamed:
    """An object with settings that have no names."""

    def __init__(self, model, fail):
        self.model, self.optimizer = model, headroom.optim.AdamW(model.parameters())
        self.scaler, self.fail, self.asked = torch.amp.GradScaler("cpu", 4.0), fail, 0

    def reduce_memory(self):
        self.asked += 1
        return True

    def step(self, tokens):
        self.scaler.scale(self.model(tokens).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler._init_scale += 1  # as all of it is restored
        self.fail()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_a_method_of_an_object_with_a_scaler_and_settings_without_names():
    """The scaler is restored, or it would refuse to unscale a second time."""
    owner = Unnamed(model_of(), Failing(MemoryError("first")))
    step = retry_on_oom(owner.step)
    with pytest.warns(UserWarning, match="its setting became a leaner one"):
        step(batch())
    assert owner.asked == 1 and owner.scaler._init_scale == 5 and owner.model.save == ["L0"] * 2


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
    assert [one.change for one in step.history] == [
        "micro-batches: 1 before, 2 now",
        "micro-batches: 2 before, 4 now",
    ]
    plain, _ = made(twin, lambda: None)
    torch.manual_seed(3)
    for _ in range(2):
        plain(batch(4), micro_batches=4)
    assert_same(contents(model), contents(twin))


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


def test_a_model_whose_blocks_have_one_level_left():
    """Those of nobody's architecture, which are at the last where they are checkpointed."""

    class Block(nn.Linear):
        gradient_checkpointing = False

    blocks = nn.Sequential(*(Block(3, 3) for _ in range(3)))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    fail = Failing(*(MemoryError() for _ in range(2)))
    step = retry_on_oom(step_of(blocks, optimizer, fail), model=blocks, optimizer=optimizer)
    with pytest.warns(UserWarning), pytest.raises(MemoryError, match="no leaner setting"):
        step(torch.ones(2, 3))
    assert [one.change for one in step.history] == ["3 blocks raised from L0 to L5"]


def test_blocks_of_transformers_that_are_checkpointed_already():
    from helpers.hf_models import inputs_of, model_of

    model = model_of("Llama")
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(**inputs_of()).loss.backward()
        raise MemoryError

    with pytest.raises(MemoryError, match="no leaner setting"):
        retry_on_oom(step, model=model, optimizer=optimizer)()


class Counts(nn.Linear):
    """Multiplies by a number that grows with each call, unless it is steady."""

    calls, is_steady = 0, False

    def forward(self, x):
        self.calls += 1
        return super().forward(x if self.is_steady else x * self.calls).tanh()


def test_levels_are_given_up_where_a_block_computes_something_else_when_it_runs_again():
    model = nn.Sequential(*(Counts(3, 3) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fail, x = Failing(MemoryError("no room")), torch.ones(2, 3)
    step = retry_on_oom(step_of(model, optimizer, fail), model=model, optimizer=optimizer)
    with pytest.warns(UserWarning) as warned:
        step(x)
    assert [str(one.message).partition(".")[0] for one in warned] == [
        "step 1 ran out of memory and is repeated: 2 blocks raised from L0 to L5",
        "step 1 failed at these levels and is repeated: blocks save what they saved at the "
        "beginning, and levels stay as they are",
    ]
    assert [block.calls for block in model] == [1, 1]
    fail.errors = [MemoryError("no room")]
    with pytest.raises(MemoryError, match="no leaner setting"):
        step(x)
    fail.errors = [RuntimeError("nothing of levels")]
    with pytest.raises(RuntimeError, match="nothing of levels") as caught:
        step(x)
    assert "headroom" not in said(caught.value)


def test_levels_that_are_given_up_are_those_of_the_beginning():
    model = nn.Sequential(*(Counts(3, 3) for _ in range(3)))
    model[0].is_steady = True
    headroom.patch(model, save=["L5", "L0", "L0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fail = Failing(MemoryError("no room"))
    step = retry_on_oom(step_of(model, optimizer, fail), model=model, optimizer=optimizer)
    with pytest.warns(UserWarning, match="levels stay as they are"):
        step(torch.ones(2, 3))
    assert ["forward" in vars(block) for block in model] == [True, False, False]


def test_a_fitted_model_with_a_scaler():
    """Its scaler is restored, or it would refuse to unscale a second time."""
    model, tokens = model_of(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = headroom.fit(
        model,
        tokens,
        budget="1 GiB",
        optimizer=optimizer,
        loss=lambda logits: logits.square().mean(),
        scaler=scaler,
        max_grad_norm=1.0,
        only={"optimizer": ("headroom",)},  # it alone has the method that fails below
    )
    fail = Failing(MemoryError("no room"))
    fitted.optimizer._prepared_count = lambda found_inf: fail() or list
    step = headroom.retry_on_oom(fitted.step)
    with pytest.warns(UserWarning, match="became"):
        step(tokens)
    assert step.retries == 1


def test_a_step_inside_another():
    """The inner one takes its settings first; then the outer one takes its own."""
    model = model_of("L4")
    optimizer = torch.optim.AdamW(model.parameters())
    fail = Failing()
    inner = retry_on_oom(step_of(model, optimizer, fail), model=model, optimizer=optimizer)
    asked = []

    def several(tokens, micro_batches=1):
        asked.append(micro_batches)
        return inner(tokens)

    outer = retry_on_oom(several, model=model, optimizer=optimizer, micro_batches=2)
    fail.errors = [MemoryError() for _ in range(2)]
    torch.manual_seed(3)
    with pytest.warns(UserWarning):
        outer(batch())
    assert model.save == ["L5", "L5"] and asked == [1, 2]
    assert (inner.retries, outer.retries) == (1, 1)
    twin = model_of("L5")
    torch.manual_seed(3)
    step_of(twin, torch.optim.AdamW(twin.parameters()))(batch())
    assert_same(contents(model), contents(twin))


def test_a_compiled_model():
    model = model_of()
    compiled = torch.compile(model, backend="eager")
    optimizer = headroom.optim.AdamW(compiled.parameters())
    fail = Failing(MemoryError("no room"))
    step = retry_on_oom(step_of(compiled, optimizer, fail), model=compiled, optimizer=optimizer)
    with pytest.warns(UserWarning, match="2 blocks raised from L0 to L1"):
        step(batch())
    assert model.save == ["L1", "L1"]


@pytest.mark.parametrize("patches", [True, False])
def test_what_the_step_patches_itself_stays(patches):
    """Patches are settings, and the step finds those that it has made when it is repeated."""
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    headroom.patch(model)
    is_patched = set(vars(model[0]))
    headroom.unpatch(model)
    plain, fail = set(vars(model[0])), Failing(MemoryError("no room"))
    if not patches:
        headroom.patch(model)

    def step(x):
        headroom.patch(model) if patches else headroom.unpatch(model)
        step_of(model, optimizer, fail)(x)

    with pytest.raises(MemoryError, match="no leaner setting"):
        retry_on_oom(step, model=model, optimizer=optimizer)(torch.ones(2, 8))
    assert set(vars(model[0])) == (is_patched if patches else plain) and is_patched != plain


def test_more_of_the_state_is_paged_before_micro_batches():
    """In the first step, where there is no state yet, and in a later one."""
    optimizers = []
    for failures in ((), (0, 2)):
        model = model_of(save="L5", layers=4)
        optimizer = headroom.optim.AdamW(model.parameters(), offload="state", budget="16 KiB")
        fail = Failing()
        step = retry_on_oom(step_of(model, optimizer, fail), model=model, optimizer=optimizer)
        for number in range(4):
            fail.errors = [torch.OutOfMemoryError("no room")] * failures.count(number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                torch.manual_seed(number)
                step(batch())
        optimizers.append((optimizer, contents(model), step))
    (plain, wanted, _), (paged, found, step) = optimizers
    assert_same(found, wanted)
    assert [one.change.partition(":")[0] for one in step.history] == ["state of AdamW"] * 2
    assert "16.0 KiB on the device before" in step.history[0].change
    assert paged.offload_handle.memory().resident < plain.offload_handle.memory().resident
    assert paged.offload_handle.budget < plain.offload_handle.budget == 16 << 10


def test_paging_ends_where_nothing_is_left_on_the_device_or_the_host_has_no_room():
    model = model_of(save="L5")
    optimizer = headroom.optim.AdamW8bit(model.parameters(), min_8bit_size=100)
    arena = headroom.HostArena()
    headroom.optim.offload(optimizer, budget="1 MiB", host=arena)
    fail = Failing()
    step = retry_on_oom(step_of(model, optimizer, fail), model=model, optimizer=optimizer)
    step(batch())
    arena.budget = 0
    fail.errors = [MemoryError("no room")]
    with pytest.raises(MemoryError) as caught:
        step(batch())
    assert "no leaner setting is left" in said(caught.value) and step.retries == 0
    arena.budget = None
    fail.errors = [MemoryError("no room") for _ in range(9)]
    before = contents(model)
    with warnings.catch_warnings(), pytest.raises(MemoryError):
        warnings.simplefilter("ignore", UserWarning)
        step(batch())
    assert 1 <= step.retries <= 8 and step.history[-1].change.endswith("only the ring now")
    assert optimizer.offload_handle.memory().resident == 0
    assert_same(contents(model), before)
    fail.errors = []
    step(batch())
