"""Which dimension of each tensor of a batch counts its samples."""

from dataclasses import dataclass

import headroom
import pytest
import torch
from headroom.step.micro_batches import (
    SAMPLES,
    largest_part,
    parts,
    picked,
    repeated,
    resized,
    samples_of,
    shares,
)
from headroom.step.pytree import tensors_in
from torch import nn

ROWS, TOKENS = 4, 6


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def axes(rows=ROWS, count=3):
    return numbered(count, rows, TOKENS)


def ids(rows=ROWS):
    return numbered(rows, TOKENS)


@dataclass
class Rows:
    position_ids: torch.Tensor
    input_ids: torch.Tensor


# Batches, and the dimension of samples in each of their tensors, None of those that have none.
BATCHES = {
    "axes first": ({"position_ids": axes(), "input_ids": ids(), "labels": ids()}, (1, 0, 0)),
    "as many axes as rows": (
        {"position_ids": axes(3), "input_ids": ids(3), "labels": ids(3)},
        (1, 0, 0),
    ),
    "axes of the text too": ({"position_ids": axes(4, 4), "input_ids": ids()}, (1, 0)),
    "embeddings": (
        {"position_ids": axes(), "inputs_embeds": numbered(ROWS, TOKENS, 2), "labels": ids()},
        (1, 0, 0),
    ),
    "other names": ({"positions": axes(), "tokens": ids(), "labels": ids()}, (1, 0, 0)),
    "no labels": ({"position_ids": axes(), "x": numbered(ROWS, TOKENS, 2)}, (1, 0)),
    "labels alone": ({"position_ids": axes(), "labels": ids()}, (1, 0)),
    "a tuple": ((axes(), ids(), ids()), (1, 0, 0)),
    "a list": ([axes(2), ids(2), ids(2)], (1, 0, 0)),
    "nested": (({"position_ids": axes(), "input_ids": ids()}, ids()), (1, 0, 0)),
    "a dataclass": (Rows(axes(), ids()), (1, 0)),
    "places in a cache": (
        {"cache_position": torch.arange(ROWS), "input_ids": numbered(ROWS, ROWS)},
        (None, 0),
    ),
    "positions of all rows": (
        {"position_ids": numbered(1, TOKENS), "input_ids": ids(), "labels": ids()},
        (None, 0, 0),
    ),
    "axes of all rows": ({"position_ids": axes(1), "input_ids": ids()}, (None, 0)),
    "as many axes of all rows as rows": (
        {"position_ids": axes(1), "input_ids": ids(3), "labels": ids(3)},
        (None, 0, 0),
    ),
    "states of layers": ({"ids": ids(), "states": numbered(2, ROWS, TOKENS, 3)}, (0, 1)),
    "masks": (
        {
            "attention_mask": numbered(ROWS, 1, TOKENS, TOKENS),
            "bias": numbered(1, ROWS, TOKENS, TOKENS),  # heads
            "input_ids": ids(),
            "number": torch.tensor(3),
        },
        (0, None, 0, None),
    ),
    "images with labels": ({"pixel_values": numbered(2, 3, 5, 5), "labels": numbered(2)}, (0, 0)),
    "a grid of all images": ({"x": numbered(ROWS, 5, 5), "grid": numbered(5, 5)}, (0, None)),
    "targets of tokens": ((numbered(1, TOKENS), numbered(TOKENS)), (0, None)),
    "three channels": ((numbered(3, 3, 5), numbered(3)), (0, 0)),
}
every = pytest.mark.parametrize("batch, dims", BATCHES.values(), ids=BATCHES)


def chosen(batch, dims, numbers):
    """What a batch of some samples holds."""
    for x, dim in zip(tensors_in(batch), dims, strict=True):
        yield x if dim is None else x.index_select(dim, torch.tensor(numbers))


def assert_is(found, wanted):
    for a, b in zip(tensors_in(found), wanted, strict=True):
        assert torch.equal(a, b)


@every
def test_parts_have_rows_of_all(batch, dims):
    samples = next(x.shape[d] for x, d in zip(tensors_in(batch), dims) if d is not None)
    assert samples_of(batch) == samples
    each = parts(batch, 2)
    size = -(-samples // 2)
    for k, part in enumerate(each):
        assert_is(part, chosen(batch, dims, [*range(k * size, min(samples, (k + 1) * size))]))
    assert_is(picked(batch, [samples - 1, 0]), chosen(batch, dims, [samples - 1, 0]))
    twice = repeated(batch, 2)
    assert_is(twice, chosen(batch, dims, [*range(samples)] * 2))
    for x, y, dim in zip(tensors_in(batch), tensors_in(resized(batch, 9)), dims):
        assert [*y.shape] == [9 if k == dim else n for k, n in enumerate(x.shape)]


class Axes(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(61, 8), nn.Embedding(100, 8)
        self.head = nn.Linear(8, 61)

    def forward(self, position_ids, input_ids, labels):
        x = self.words(input_ids) + self.places(position_ids).sum(0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_gradients_of_parts_add_up(rows):
    torch.manual_seed(0)
    model = Axes().double()
    labels = ids(rows).clone()
    labels[0, 1:] = -100
    batch = {"position_ids": axes(rows), "input_ids": ids(rows), "labels": labels}
    model(**batch).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    accumulator = headroom.GradAccumulator(model)
    for part, weight in headroom.micro_batches(batch, 2):
        with accumulator.micro_batch(weight=weight):
            model(**part).backward()
    accumulator.finish()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-15)


PIECES = {
    "pixel_values": torch.zeros(20, 8),
    "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4]]),
}


@pytest.mark.parametrize("rows", [4, 1])
def test_images_that_belong_to_nobody(rows):
    batch = PIECES | {"input_ids": ids(rows)}
    if rows == 1:
        batch["cu_seqlens"] = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match=r"nothing says .* of pixel_values, \[20, 8\]; let the lo"):
        headroom.micro_batches(batch, 2)
    assert parts(batch, 1) == [batch]
    assert largest_part(batch, 2)["pixel_values"] is batch["pixel_values"]  # as much as it takes


def test_images_of_one_row():
    batch = PIECES | {"input_ids": ids(1)}
    assert len(headroom.micro_batches(batch, 2)) == 1


def test_a_packed_row_with_axes_and_masks():
    positions = torch.tensor([0, 1, 2, 3, 0, 1])
    pairs = numbered(1, 1, TOKENS, TOKENS)
    padding = numbered(1, 1, 1, TOKENS)
    told = {"cu_seqlens": torch.tensor([0, 4, 6])}
    for batch in (
        {"position_ids": axes(1), "attention_mask": pairs, "padding_mask": padding, "x": ids(1)}
        | told,
        {"position_ids": positions.expand(4, 1, TOKENS), "input_ids": ids(1)},
    ):
        assert samples_of(batch) == 2
        for part, at in zip(parts(batch, 2), (slice(0, 4), slice(4, 6)), strict=True):
            assert torch.equal(part["position_ids"], batch["position_ids"][..., at])
            if "padding_mask" in batch:
                assert torch.equal(part["attention_mask"], pairs[:, :, at, at])
                assert torch.equal(part["padding_mask"], padding[..., at])


def test_packed_rows_count_as_rows():
    """A part of one row has the share of a row, however many sequences that holds."""
    positions = torch.tensor([[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]])
    batch = {"x": ids(3), "position_ids": positions}
    assert [float(share) for share in shares(parts(batch, 2), SAMPLES)] == [2 / 3, 1 / 3]
    assert {float(share) for share in shares(parts(batch, 3), SAMPLES, batch)} == {1 / 3}
    assert [weight for _, weight in headroom.micro_batches(batch, 3)] == [1, 1, 1]
    row = {"x": ids(1), "position_ids": positions[:1]}
    assert [weight for _, weight in headroom.micro_batches(row, 2)] == [2, 1]
