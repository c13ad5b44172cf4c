"""Blocks that compute something else when they run again in the backward pass have no levels."""

import functools
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import headroom
import pytest
import torch
from headroom.checkpointing import RecomputeError
from torch import nn

mse_loss = nn.functional.mse_loss


class Two(nn.Module):
    """Keeps more than its input for the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).square())


class Moves(Two):
    """Subtracts a mean that it moves before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean)


class Counts(Two):
    """Multiplies by a number that grows with each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x * (1 + 0.1 * self.calls))


class Drops(Two):
    """Drops elements by random numbers that torch does not draw."""

    def forward(self, x):
        kept = torch.tensor([random.random() < 0.8 for _ in range(48)])
        return super().forward(x * kept)


class Fills(Two):
    """Writes to the argument that it has used."""

    def forward(self, x):
        result = super().forward(x * 1.0)
        with torch.no_grad():
            x.mul_(0.5)
        return result


class Scales(Two):
    """Writes to its argument before it uses it."""

    def forward(self, x):
        return super().forward(x.mul_(1.5))


class Norms(Two):
    """Moves the running statistics of a norm, which its result does not depend on."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(48), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.norm(super().forward(x)))


def chain(kind):
    """Returns a model of four blocks, of which none has the batch as its argument."""
    return nn.Sequential(nn.Linear(48, 48), nn.Sequential(*(kind() for _ in range(4))))


def trained(make, batch, **options):
    """Returns a model after three steps, and what fit returned for it with these options; or,
    without options, after three steps of plain torch, and None."""
    for seed in (torch.manual_seed, random.seed):
        seed(0)
    model = make()
    fitted = headroom.fit(model, batch, loss=mse_loss, **options) if options else None
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in (torch.manual_seed, random.seed):
        seed(1)
    for _ in range(3):
        if fitted is not None:
            fitted.step(batch)
            continue
        mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, fitted


def budget_of(make, batch):
    """Returns what the leanest levels need, and a tenth more."""
    model = make()
    headroom.patch(model, "L5")
    return int(1.1 * headroom.plan(model, torch.optim.AdamW, batch, loss=mse_loss).peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Moves, Counts, Drops, Fills])
def test_gradients_are_those_of_torch(kind):
    make = functools.partial(chain, kind)
    batch = torch.randn(200, 48), torch.randn(200, 48)
    only = {"micro_batches": (1,), "release": (False,)}
    budget = budget_of(functools.partial(chain, Two), batch)  # whose layers are the same
    with pytest.raises(headroom.fitting.DoesNotFit, match="blocks cannot be run again"):
        headroom.fit(make(), batch, budget=budget, loss=mse_loss, only=only)
    plain, _ = trained(make, batch)
    model, fitted = trained(make, batch, budget="1 GiB", only=only)
    assert fitted.choice.levels == () and "blocks cannot be run again" in str(fitted)
    for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values()):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, msg=name)


class InBfloat16(nn.Module):
    """A chain whose batch takes the dtype of its weights."""

    def __init__(self, kind):
        super().__init__()
        self.chain = chain(kind)

    def forward(self, x):
        return self.chain(x.to(self.chain[0].weight.dtype)).float()


class CountsInBfloat16(Counts):
    def forward(self, x):
        self.calls -= self.first.weight.dtype != torch.bfloat16
        return super().forward(x)


@pytest.mark.parametrize("kind", [Counts, CountsInBfloat16])
def test_weights_in_bfloat16(kind):
    """Where there is no other choice, they have no levels; else they are none."""
    batch = torch.randn(20, 48), torch.randn(20, 48)
    options = {"budget": "1 GiB", "loss": mse_loss, "allow": ("bf16",), "dry_run": True}
    only = {"weights": ("bf16",), "micro_batches": (1,)}
    fitted = headroom.fit(InBfloat16(kind), batch, **options, only=only)
    assert fitted.choice.levels == () and fitted.choice.weights == "bf16"
    assert fitted.notes[0].startswith("levels: blocks cannot be run again: checkpoint: ")
    fitted = headroom.fit(InBfloat16(kind), batch, **options, only={"micro_batches": (1,)})
    if kind is Counts:
        assert fitted.choice.levels == ()
    else:
        assert fitted.choice.weights == "given" and len(fitted.choice.levels) == 4
        note = "bf16 weights: blocks cannot be run again with bf16 weights: checkpoint: "
        assert fitted.notes[0].startswith(note)


def test_running_statistics_and_dropout_are_no_change():
    make, batch = functools.partial(chain, Norms), (torch.randn(200, 48), torch.randn(200, 48))
    fitted = headroom.fit(make(), batch, budget=budget_of(make, batch), loss=mse_loss, dry_run=True)
    assert "L5" in fitted.choice.levels


@pytest.mark.parametrize("kind", [Moves, Counts, Drops, Fills, Scales, Norms])
def test_a_repeated_step_has_the_gradients_of_torch(kind):
    """Blocks that compute something else when they run again, or that write to what they would
    be run again from, go back to the level that they had, and the step is repeated; others stay at
    L5."""
    batch, models = torch.randn(200, 48), []
    for errors in ([], [MemoryError("no room")]):
        for seed in (torch.manual_seed, random.seed):
            seed(0)
        model = chain(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer, errors=errors):
            model(x).square().mean().backward()
            if errors:
                raise errors.pop()
            optimizer.step()
            optimizer.zero_grad()

        if errors:
            step = headroom.retry_on_oom(step, model=model, optimizer=optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(3):
                step(batch)
        models.append(model)
    plain, model = models
    for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values()):
        assert torch.equal(other, one), name
    changes = [retry.change for retry in step.history]
    assert changes[0] == "4 blocks raised from L0 to L5"
    assert len(changes) == (1 if kind is Norms else 2) and step.retries == len(changes)
    if kind is not Norms:
        assert "levels stay as they are" in changes[1]
        assert ("inplace" if kind in (Fills, Scales) else "saved tensor") in step.report()


def test_without_levels_the_next_setting_is_taken():
    model, asked, room = chain(Counts), [], [MemoryError("no room") for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, micro_batches=1):
        asked.append(micro_batches)
        for part in x.chunk(micro_batches):
            (model(part).square().mean() / micro_batches).backward()
        if micro_batches == 1 and room:
            raise room.pop()
        optimizer.step()
        optimizer.zero_grad()

    step = headroom.retry_on_oom(step, model=model, optimizer=optimizer, micro_batches=2)
    with pytest.warns(UserWarning) as warned:
        step(torch.randn(8, 48))
    assert "step 1 failed at these levels and is repeated: blocks save" in str(warned[1].message)
    assert asked == [1, 1, 1, 2] and [block.calls for block in model[1]] == [2] * 4


def counting(step_of, **options):
    """Returns a model of blocks that count, and the retrying step that ``step_of`` makes of the
    model, its optimizer and a list of errors, of which the step raises the last one."""
    torch.manual_seed(0)
    model, errors = chain(Counts), [MemoryError("no room")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, errors)
    return model, errors, headroom.retry_on_oom(step, model=model, optimizer=optimizer, **options)


def plain_step(model, optimizer, errors):
    def step(x):
        model(x).square().mean().backward()
        if errors:
            raise errors.pop()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.filterwarnings("ignore:step")
def test_an_error_that_has_nothing_to_do_with_levels_is_raised():
    def step_of(model, optimizer, errors):
        def step(x):
            model(x).square().mean().backward()
            if errors:
                raise errors.pop()
            raise RuntimeError("no matter what")

        return step

    model, _, step = counting(step_of)
    with pytest.raises(RuntimeError, match="no matter what"):
        step(torch.randn(8, 48))
    assert "forward" not in vars(model[1][0]) and step.retries == 2


@pytest.mark.filterwarnings("ignore:step")
def test_levels_are_verified_in_the_first_step_that_runs_through():
    """Also if the step that raised them has failed, and its batch was left out."""
    batch = torch.randn(8, 48)
    model, errors, step = counting(plain_step)
    errors.append(MemoryError("no room"))
    with pytest.raises(MemoryError, match="no leaner setting"):
        step(batch)
    for _ in range(3):
        step(batch)
    assert [block.calls for block in model[1]] == [3] * 4
    assert "levels stay as they are" in step.history[-1].change


@pytest.mark.filterwarnings("ignore:step")
def test_a_forward_pass_in_another_thread_is_verified():
    def step_of(model, optimizer, errors):
        def step(x):
            with ThreadPoolExecutor(1) as pool:
                loss = pool.submit(lambda: model(x).square().mean()).result()
            loss.backward()
            if errors:
                raise errors.pop()
            optimizer.step()
            optimizer.zero_grad()

        return step

    model, _, step = counting(step_of)
    step(torch.randn(8, 48))
    assert [block.calls for block in model[1]] == [1] * 4 and step.retries == 2


@pytest.mark.filterwarnings("ignore:step")
def test_levels_are_given_up_too_if_the_step_cannot_be_undone():
    """A released gradient has stepped the last layer before a block differs."""

    def step_of(model, optimizer, errors):
        def step(x):
            loss = model(x).square().mean()
            if errors:
                raise errors.pop()
            loss.backward()
            optimizer.step()

        return step

    torch.manual_seed(0)
    model, errors = nn.Sequential(chain(Counts), nn.Linear(48, 3)), [MemoryError("no room")]
    optimizer = headroom.optim.AdamW(model.parameters())
    headroom.release_gradients(model, optimizer, bucket_bytes=1)
    step = headroom.retry_on_oom(
        step_of(model, optimizer, errors), model=model, optimizer=optimizer
    )
    with pytest.raises(RecomputeError, match="cannot be repeated, since it has changed"):
        step(torch.randn(8, 48))
    assert "forward" not in vars(model[0][1][0])
