"""Batches that are taken from loaders of training without a trace."""

import random

import pytest
import torch
from headroom.integrations.batches import MOST, moved, sample_batch
from headroom.step.micro_batches import repeated
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

ROWS = 11


class Rows(Dataset):
    """Samples with random numbers of torch and Python in them."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": torch.tensor([index, torch.rand(()), random.random()])}


class Batched(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Whole(Rows):
    """Makes batches by itself."""

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)) + torch.rand(())}


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Rows()[index] for index in range(ROWS))


def seeded():
    return torch.Generator().manual_seed(4)


LOADERS = {
    "in order": lambda: DataLoader(Rows(), batch_size=3),
    "shuffled": lambda: DataLoader(Rows(), batch_size=3, shuffle=True),
    "with a generator": lambda: DataLoader(Rows(), batch_size=3, shuffle=True, generator=seeded()),
    "with a batch sampler": lambda: DataLoader(
        Batched(), batch_sampler=BatchSampler(RandomSampler(Rows(), generator=seeded()), 4, False)
    ),
    "batches of the dataset": lambda: DataLoader(Whole(), batch_size=None),
    "a stream": lambda: DataLoader(Stream(), batch_size=3),
}


def drawn(loader, takes):
    """The batches of two epochs, and a number after them."""
    torch.manual_seed(1)
    random.seed(1)
    first = sample_batch(loader, who="a test")["x"] if takes else None
    batches = [batch["x"] for _ in range(2) for batch in loader]
    return first, [*batches, torch.rand(()), torch.tensor(random.random())]


@pytest.mark.parametrize("name", LOADERS)
def test_a_batch_is_taken_without_a_trace(name):
    (first, batches), (_, want) = drawn(LOADERS[name](), True), drawn(LOADERS[name](), False)
    assert all(torch.equal(a, b) for a, b in zip(batches, want, strict=True))
    assert first.shape == batches[0].shape
    if name in ("in order", "with a batch sampler", "a stream"):  # the others draw a seed before
        assert torch.equal(first[:, 0], batches[0][:, 0])


class Rising(Dataset):
    """Rows whose lengths come in any order, and how many were read."""

    def __init__(self, lengths):
        self.lengths, self.read = lengths, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.read += 1
        return {"x": torch.zeros(self.lengths[index])}


def test_it_is_the_largest_of_those_that_are_looked_at():
    lengths = [3 + 7 * n % 50 for n in range(MOST + 40)]
    lengths[200], lengths[MOST + 3] = 90, 99  # which is beyond
    found = sample_batch(DataLoader(Rising(lengths), batch_size=1), who="a test")
    assert found["x"].shape == (1, 90)
    data = Rising([5] * 100)
    assert sample_batch(DataLoader(data, batch_size=2), who="a test")["x"].shape == (2, 5)
    assert data.read == 16


def test_a_loader_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    )
    try:
        runs = []
        for takes in (True, False):
            torch.manual_seed(1)  # the sampler's own is taken from it
            loader = DataLoader(Rows(), batch_size=3, shuffle=True)
            runs.append(drawn(accelerator.prepare(loader), takes))
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert torch.equal(runs[0][0][:, 0], runs[0][1][0][:, 0])


def test_what_is_refused():
    with pytest.raises(TypeError, match="a test: the training loader is list, wanted a DataLoader"):
        sample_batch([1, 2], who="a test")
    with pytest.raises(ValueError, match="a test: the training loader has no batch"):
        sample_batch(DataLoader(Rows(), batch_size=20, drop_last=True), who="a test")


def test_batches_repeated_and_moved():
    batch = {"x": torch.arange(6).view(2, 3), "n": torch.tensor(3), "rest": (torch.ones(2), "name")}
    found = repeated(batch, 3)
    assert torch.equal(found["x"], torch.arange(6).view(2, 3).repeat(3, 1))
    assert found["n"] is batch["n"] and found["rest"][0].shape == (6,)
    assert found["rest"][1] == "name" and repeated(batch, 1) is batch
    there = moved(batch, torch.device("meta"))
    assert there["x"].is_meta and there["rest"][0].is_meta and there["rest"][1] == "name"
