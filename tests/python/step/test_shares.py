"""Micro-batches of padded, uneven and empty parts have the gradient of the whole batch."""

from fractions import Fraction

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.step.micro_batches import (
    bytes_of,
    counts,
    labels_of,
    mixes_samples,
    parts,
    samples_of,
    shares,
    some_samples,
)
from headroom.step.rules import rule_of, rules_of
from headroom.step.run import train, weighed
from torch import nn

from helpers.fitted_models import Plain, ids
from helpers.fitting import step_of

ROWS = 7


def padded(empty=()):
    """Rows of very different lengths; some have no label that counts."""
    tokens = torch.randint(61, (ROWS, 12), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    for k in range(ROWS):
        labels[k, 12 - k :] = -100
        if k in empty:
            labels[k] = -100
    return {"ids": tokens, "labels": labels}


def gradient(step, each, rule):
    """The gradient of a step, by the loop that makes it."""
    model = step.model
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = train(step.but(optimizer=optimizer, rule=rule), each)
    found = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters())])
    with torch.no_grad():
        for p, b in zip(model.parameters(), before):
            p.copy_(b)
    return found, loss


def assert_same_gradient(step, count, rule, tolerance):
    whole, loss = gradient(step, [step.batch], rule)
    found, sum_of_parts = gradient(step, parts(step.batch, count), rule)
    assert (found - whole).norm() <= tolerance * whole.norm()
    assert abs(sum_of_parts - loss) <= tolerance * abs(loss)


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("empty", [(), (0, 1, 2, 3), (6,)])
def test_a_mean_over_labels_in_float64(count, empty):
    step = step_of(Plain().double(), padded(empty))
    rule = rule_of(step, rules_of(step))
    assert rule == "tokens"
    assert_same_gradient(step, count, rule, 1e-12)
    whole, _ = gradient(step, [step.batch], rule)
    equal, _ = gradient(step, parts(step.batch, count), "samples")
    assert not (equal - whole).norm() <= 1e-2 * whole.norm()  # what the shares are for


def test_a_mean_over_samples_of_uneven_parts_in_float64():
    model = nn.Linear(5, 3).double()
    batch = (torch.randn(ROWS, 5).double(), torch.randn(ROWS, 3).double())
    step = step_of(model, batch, F.mse_loss)
    assert rules_of(step) == ("samples",)
    for count in (2, 3, 4):
        assert_same_gradient(step, count, "samples", 1e-14)
    assert [float(s) for s in shares(parts(batch, 3))] == pytest.approx([3 / 7, 3 / 7, 1 / 7])


class MeanOfMeans(nn.Module):
    """A loss that counts each sequence the same, however long."""

    def __init__(self):
        super().__init__()
        self.inner = Plain()

    def forward(self, ids, labels):
        losses = [self.inner(a[None], b[None]) for a, b in zip(ids, labels)]
        return torch.stack(losses).mean()


def test_the_batch_shows_what_the_loss_is_a_mean_over():
    batch = padded()
    batch = {name: x[:6] for name, x in batch.items()}
    step = step_of(MeanOfMeans(), batch)
    assert rule_of(step, rules_of(step)) == "samples"
    assert rule_of(step_of(Plain(), batch), rules_of(step)) == "tokens"
    shifted = step_of(Plain(), batch, forward=lambda m, b: m(b["ids"][:, :-1], b["labels"][:, 1:]))
    assert rule_of(shifted, rules_of(shifted)) == "next tokens"
    total = step_of(Plain(), batch, forward=lambda m, b: m(**b) * b["labels"].ne(-100).sum())
    assert rule_of(total, rules_of(total)) is None
    assert rule_of(total, ("samples", "sum")) == "sum"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_rules_whose_losses_are_near_are_told_apart(amp, seed):
    """Of a model that knows nothing yet, all tokens have about the same loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 500))
    ids = torch.randint(500, (8, 64))
    labels = ids.clone()
    for row, start in enumerate(torch.randint(4, 64, (8,)).tolist()):
        labels[row, start:] = -100

    def mean_of_means(model, batch):
        logits = model(batch["ids"]).transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        return (losses.sum(1) / batch["labels"].ne(-100).sum(1)).mean()

    step = step_of(model, {"ids": ids, "labels": labels}, forward=mean_of_means, amp=amp)
    assert rule_of(step, rules_of(step)) == "samples"


def test_a_batch_without_any_label_has_the_loss_that_it_has():
    each = parts(padded(range(ROWS)), 3)
    assert [float(share) for share in shares(each, "tokens")] == [1 / 3] * 3
    assert torch.isnan(gradient(step_of(Plain(), None), each, "tokens")[1])


def test_the_bits_of_equal_parts_are_those_of_a_division():
    loss = torch.randn(1000)
    each = parts(torch.zeros(9, 2), 3)
    assert torch.equal(weighed(loss, shares(each)[0]), loss / 3)
    assert weighed(loss, shares(each[:1])[0]) is loss


def test_parts_of_what_cannot_be_cut():
    assert [len(part) for part in parts(torch.zeros(3, 2), 5)] == [1, 1, 1]
    assert [len(part) for part in parts(torch.zeros(5, 2), 4)] == [2, 2, 1]
    for batch in (torch.zeros(()), {"a": 3}, torch.zeros(0, 2)):
        with pytest.raises(ValueError, match="no samples to make 2 micro-batches of"):
            parts(batch, 2)


def test_parts_and_their_shares():
    x, row = torch.arange(7), torch.zeros(3)
    batch = {"x": x, "row": row, "y": torch.ones(7, 2), "scalar": torch.ones(()), "n": 3}
    each = parts(batch, 3)
    assert [part["x"].tolist() for part in each] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(part["row"] is row and part["n"] == 3 for part in each)
    assert each[0]["y"].data_ptr() == batch["y"].data_ptr()  # views
    assert parts(batch, 1) == [batch] and samples_of(batch) == 7 and samples_of([3]) is None
    assert samples_of([torch.ones(()), torch.ones(4)]) == 4
    assert bytes_of(batch) == 8 * 7 + 4 * 3 + 4 * 14 + 4
    assert shares(each) == [Fraction(3, 7), Fraction(3, 7), Fraction(1, 7)]
    assert shares(each, "sum") == [1, 1, 1] and shares([{"n": 3}]) == [1]


def test_tokens_that_count():
    tokens = torch.tensor([[1, 2, 3], [4, -100, -100], [5, 6, -100], [-100, 7, 7]])
    flat = tokens[:, 0]
    halves = parts({"labels": tokens}, 2), parts(("x", flat), 2)
    assert shares(halves[0], "tokens") == [Fraction(4, 8), Fraction(4, 8)]
    assert shares(halves[0], "next tokens") == [Fraction(2, 5), Fraction(3, 5)]
    assert shares(halves[1], "next tokens") == [Fraction(2, 3), Fraction(1, 3)]  # none before them
    shifted = parts({"shift_labels": tokens, "labels": tokens * 0}, 2)
    assert shares(shifted, "next tokens") == [Fraction(4, 8), Fraction(4, 8)]
    ignored = torch.full((2, 3), -100)
    assert shares(parts({"labels": ignored}, 2), "tokens") == [Fraction(1, 2)] * 2
    for batch, found in (
        ({"labels": tokens}, tokens), ({"labels": tokens, "shift_labels": flat}, flat),
        ((1, tokens), tokens), ([tokens], tokens), ((tokens, 1), None), ((), None), (tokens, None),
        ({"x": tokens}, None), ({"labels": torch.ones(2)}, None),
        ({"labels": torch.tensor(1)}, None), ([torch.ones(2, dtype=torch.complex64)], None),
    ):  # fmt: skip
        assert labels_of(batch) is found


def test_some_samples_are_spread_over_all():
    x = torch.arange(10)
    some = some_samples({"x": x, "row": x[:3], "scalar": torch.ones(())}, 4)
    assert some["x"].tolist() == [0, 2, 5, 7] and some["row"].tolist() == [0, 1, 2]
    for count in (10, 64):
        every = some_samples([x], count)[0]
        assert torch.equal(every, x) and every.data_ptr() != x.data_ptr()


def test_numbers_of_micro_batches():
    def sizes(samples):
        return list(counts(torch.zeros(samples, 1)))

    assert sizes(96) == [2, 4, 8, 16, 32, 96] and sizes(64) == [2, 4, 8, 16, 32, 64]
    assert sizes(15) == [3, 5, 15] and sizes(254) == [2, 127]
    assert sizes(127) == [127] and sizes(131) == []
    assert sizes(1) == sizes(0) == list(counts(torch.tensor(0.0))) == []


def test_norms_that_mix_samples():
    model = nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3))
    assert mixes_samples(model) and not mixes_samples(model[:1])
    assert not mixes_samples(model.eval())


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_models_of_transformers(name):
    """Their loss is computed in float32, whatever the model is in."""
    model_of = pytest.importorskip("helpers.hf_models").model_of
    batch = padded((5,))
    batch["input_ids"] = batch.pop("ids")
    step = step_of(model_of(name).double().eval(), batch)
    rule = rule_of(step, rules_of(step))
    assert rule == rules_of(step)[0] == ("tokens" if name == "Bert" else "next tokens")
    assert_same_gradient(step, 3, rule, 1e-6)
    assert_same_gradient(step, 7, rule, 1e-6)


def test_a_fitted_step_of_a_padded_batch():
    """And of one that is smaller than that which was planned."""
    tokens = ids()[:, :12].repeat(4, 1)
    labels = tokens.clone()
    labels[::2, 5:] = -100
    batch = {"ids": tokens, "labels": labels}
    model = Plain().double()
    step = step_of(model, batch)
    want = {}
    for rows in (12, 7, 2):
        small = {name: x[:rows] for name, x in batch.items()}
        want[rows] = gradient(step, [small], "tokens")
    start = [p.detach().clone() for p in model.parameters()]
    fitted = headroom.fit(
        model,
        batch,
        budget="1 GiB",
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        only={"micro_batches": (4,)},
    )
    for rows, (gradients, loss) in want.items():
        small = {name: x[:rows] for name, x in batch.items()}
        assert sum(fitted.shares(fitted.micro_batches(small))) == pytest.approx(1)
        assert abs(fitted.step(small) - loss) <= 1e-12
        found = torch.cat([(a - p.detach()).flatten() for a, p in zip(start, model.parameters())])
        assert (found - gradients).norm() <= 1e-12 * gradients.norm()
        with torch.no_grad():
            for p, a in zip(model.parameters(), start):
                p.copy_(a)
