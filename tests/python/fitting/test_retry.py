"""retry_on_oom: a step that fails at any of its allocations, and goes on as a leaner run would."""

import functools
import random
import warnings

import headroom
import numpy as np
import pytest
import torch
from headroom.fitting.retry import retry_on_oom
from torch import nn

from helpers.failing_allocator import failing_allocator

STEPS = 3


@pytest.fixture
def allocator():
    with failing_allocator() as allocator:
        yield allocator


class Normed(nn.Module):
    """Repeated blocks with statistics and with dropout."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.GELU())
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def transformer(save="L0"):
    torch.manual_seed(1)
    config = headroom.nn.TransformerConfig(
        vocab_size=11, hidden_size=8, layers=2, heads=2, features=12, dropout=0.2, tied=True
    )
    return headroom.nn.Transformer(config, save=save)


def normed(save="L0"):
    torch.manual_seed(1)
    model = Normed()
    headroom.patch(model, save=save, norms=False, glu=False)
    return model


def batches(model):
    generator = torch.Generator().manual_seed(5)
    if isinstance(model, Normed):
        return [torch.randn(5, 6, generator=generator) for _ in range(STEPS)]
    return [torch.randint(11, (2, 7), generator=generator) for _ in range(STEPS)]


OPTIMIZERS = {
    "headroom": functools.partial(headroom.optim.AdamW, max_grad_norm=0.5),
    "8bit": functools.partial(headroom.optim.AdamW8bit, min_8bit_size=100),
    "adafactor": headroom.optim.Adafactor,
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "loop": functools.partial(torch.optim.AdamW, foreach=False),
}


class Run:
    """A model, its optimizer and a step that draws from every generator."""

    def __init__(self, build, optimizer, save="L0", **options):
        self.model = build(save)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=0.01)
        self.losses = []
        random.seed(3)
        np.random.seed(4)
        torch.manual_seed(2)
        self.step = retry_on_oom(
            self.plain_step, model=self.model, optimizer=self.optimizer, **options
        )

    def plain_step(self, batch):
        factor = random.random() + np.random.rand()
        loss = self.model(batch).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self):
        for batch in batches(self.model):
            self.losses.append(self.step(batch))
        return self

    def state(self):
        """Everything that a trajectory is, as tensors by name."""
        found = {f"loss {k}": loss for k, loss in enumerate(self.losses)}
        found |= {name: value for name, value in self.model.state_dict().items()}
        for k, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{k} {name}": torch.as_tensor(value) for name, value in entry.items()}
        found["torch"] = torch.get_rng_state()
        found["python"] = torch.tensor(random.getstate()[1])
        found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
        return {name: value.detach().clone() for name, value in found.items()}


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert got[name].numpy().tobytes() == value.numpy().tobytes(), name


def quiet_train(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return run.train()


def every_failure(allocator, build, optimizer, which, stride=1):
    """Fails at each allocation of step ``which``, and compares with the leaner run."""
    leaner = "L1" if build is transformer else "L5"
    wanted = quiet_train(Run(build, optimizer, leaner)).state()
    number, failed = 1, 0
    usual = None
    while True:
        run = Run(build, optimizer)
        own, calls = run.step, []

        def failing(batch, own=own, calls=calls, at=number):
            calls.append(batch)
            if len(calls) != which:
                return own(batch)
            with allocator.failing_at(at):
                return own(batch)

        run.step = failing
        before = allocator.live()
        quiet_train(run)
        left = allocator.live() - before
        assert_same(run.state(), wanted)
        usual = left if usual is None else usual
        assert left == usual, "a failure left memory behind"
        if allocator.count < number:
            break
        # A table of addresses is made without: the optimizer then passes its tensors one by one.
        assert own.retries == 1 or optimizer in ("headroom", "8bit", "adafactor")
        failed += own.retries
        number += stride
    assert own.retries == 0 and failed >= 0.9 * (number // stride) > 2


BUILDS = pytest.mark.parametrize("build", [transformer, normed], ids=["transformer", "batchnorm"])


@BUILDS
@pytest.mark.parametrize("optimizer", ["headroom", "8bit", "adafactor", "foreach", "fused"])
def test_a_failure_at_some_allocations_of_a_step(allocator, build, optimizer):
    every_failure(allocator, build, optimizer, which=1, stride=11)


@pytest.mark.slow
@BUILDS
@pytest.mark.parametrize("which", [1, 2], ids=["first", "second"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_failure_at_every_allocation_of_a_step(allocator, build, optimizer, which):
    every_failure(allocator, build, optimizer, which)
