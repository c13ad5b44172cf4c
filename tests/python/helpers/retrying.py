"""Training steps that run out of memory where a test says, and what they leave."""

import contextlib
import functools
import random
import re
import warnings

import headroom
import numpy as np
import torch

CPU_ERROR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


def model_of(save="L0", layers=2):
    """A language model with dropout, which has all levels."""
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
    """What a step changes in a model and in torch's random numbers."""
    found = [*model.parameters(), *model.buffers()]
    return [x.detach().clone() for x in found] + [torch.get_rng_state()]


def assert_same(got, wanted):
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


def said(error):
    """What an error says, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def quietly(function, *arguments):
    """Calls a function without the warnings of steps that are repeated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*arguments)


class Run:
    """A training, to be compared with another of its kind.

    A subclass has ``made(save)``, which sets ``model``, ``optimizer`` and what else it has, and
    ``plain(batch)``, a step.
    """

    more = ()  # names of further arguments of retry_on_oom that are attributes
    leaner = "L1"  # the next level after L0

    def __init__(self, save="L0"):
        random.seed(3)
        np.random.seed(4)
        self.made(save)
        torch.manual_seed(2)
        options = {name: getattr(self, name) for name in ("optimizer", *self.more)}
        self.step = headroom.retry_on_oom(self.plain, model=self.model, **options)

    def batches(self):
        return [batch(2), batch(3), batch(2)]

    def others(self):
        """Further tensors that two equal runs have in common, by name."""
        return {}

    def state(self):
        """Everything that a trajectory is, as tensors by name."""
        found = dict(self.model.state_dict()) | self.others()
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        for n, optimizer in enumerate(optimizers):
            for k, entry in optimizer.state_dict()["state"].items():
                entry = entry if isinstance(entry, dict) else {"": entry}
                found |= {f"{n} {k} {name}": value for name, value in entry.items()}
        found["torch"] = torch.get_rng_state()
        found["python"] = random.getstate()[1]
        found["numpy"] = np.random.get_state()[1].astype(np.int64)
        return {
            name: torch.as_tensor(value).detach().clone()
            for name, value in found.items()
            if isinstance(value, (torch.Tensor, int, float, tuple, np.ndarray))
        }


def assert_same_state(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (got[name], value))
        assert torch.equal(a, b), name


def fail_everywhere(allocator, kind, which=1, stride=1, late=None):
    """Trains a :class:`Run` once for each allocation of its step number ``which``, which fails
    there, and compares with a run at the leaner level. Returns how many steps were repeated.

    Args:
        late: a pattern of the error that says that a step cannot be repeated, if that may be.
    """
    wanted = quietly(_trained, kind(kind.leaner)).state()
    number, repeated, swallowed, usual = 1, 0, 0, None
    while True:
        run = kind()
        before = allocator.live()
        try:
            quietly(_trained, run, which, functools.partial(allocator.failing_at, number))
        except RuntimeError as error:
            assert late is not None and re.search(late, said(error)), error
        else:
            assert_same_state(run.state(), wanted)
            left = allocator.live() - before
            usual = left if usual is None else usual
            assert left == usual, "a failure left memory behind, or the one before it did"
            swallowed += not run.step.retries
        repeated += run.step.retries
        if allocator.count < number:
            break
        number += stride
    # An optimizer of Headroom does without a table of addresses if it cannot be made.
    assert swallowed <= 1 + 0.1 * number // stride
    return repeated


def _trained(run, which=None, around=contextlib.nullcontext):
    for k, one in enumerate(run.batches(), 1):
        with around() if k == which else contextlib.nullcontext():
            run.step(one)
    return run
