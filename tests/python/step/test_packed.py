"""Batches whose sequences are packed into one row: cut at their ends, and weighed by labels."""

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.step.description import Step
from headroom.step.micro_batches import (
    NEXT_TOKENS,
    can_cut,
    counts,
    largest_part,
    parts,
    repeated,
    resized,
    samples_of,
    shares,
    some_samples,
)
from headroom.step.packed import ends_of, spread
from headroom.step.rules import rule_of, rules_of
from torch import nn

LENGTHS = (12, 3, 20, 5, 1, 9)


def ours(lengths=LENGTHS, dtype=torch.int64):
    tokens = torch.arange(sum(lengths))[None] % 61
    return {
        "ids": tokens,
        "labels": tokens.clone(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=dtype),
    }


def flattened(lengths=LENGTHS, **options):
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": [*range(1, 1 + n)]} for n in lengths]
    return transformers.DataCollatorWithFlattening(**options)(rows)


def sequences_of(batch, name="ids"):
    ends = ends_of(batch) or [0, batch[name].shape[1]]
    return [batch[name][0, a:b].tolist() for a, b in zip(ends, ends[1:])]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 9])
def test_parts_hold_whole_sequences_in_order(count):
    batch = ours()
    found = parts(batch, count)
    assert len(found) == min(count, len(LENGTHS))
    assert sum(map(sequences_of, found), []) == sequences_of(batch)
    for part in found:
        assert part["cu_seqlens"][0] == 0 and part["cu_seqlens"][-1] == part["ids"].shape[1]
        assert part["ids"].untyped_storage().data_ptr() == batch["ids"].untyped_storage().data_ptr()
    most = max(part["ids"].shape[1] for part in found)
    assert largest_part(batch, count)["ids"].shape[1] == most


def test_parts_have_about_as_many_tokens():
    ends = [0, 10, 20, 30, 130, 140, 150, 160]
    assert [(part.start, part.stop) for part in spread(ends, 2)] == [(0, 4), (4, 7)]
    assert [(part.start, part.stop) for part in spread([0, 100, 101, 102], 3)] == [
        (0, 1), (1, 2), (2, 3)
    ]  # fmt: skip
    assert [(part.start, part.stop) for part in spread([0, 1, 2, 102], 3)] == [
        (0, 1), (1, 2), (2, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}]
)
def test_batches_of_transformers_are_cut_as_the_collator_would_have_made_them(options):
    whole = flattened(**options)
    assert ends_of(whole) == [0, 12, 15, 35, 40, 41, 50]
    for part, numbers in zip(parts(whole, 3), spread(ends_of(whole), 3)):
        wanted = flattened([LENGTHS[n] for n in numbers], **options)
        assert part.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                if name == "input_ids" or name == "labels":
                    assert part[name].shape == value.shape
                else:
                    assert torch.equal(part[name], value) and part[name].dtype == value.dtype, name
            else:
                assert part[name] == value, name


@pytest.mark.parametrize(
    "batch",
    [
        {"ids": torch.ones(2, 6, dtype=torch.int64)},
        {"ids": torch.ones(1, 6, dtype=torch.int64)},
        {"ids": torch.ones(1, 6, dtype=torch.int64), "position_ids": torch.arange(6)[None]},
        torch.ones(1, 6),
        {"x": torch.ones(6)},
        *(
            {
                "ids": torch.ones(1, 6),
                "position_ids": torch.arange(6)[None] % 3,
                "attention_mask": mask,
            }
            for mask in (
                torch.tensor([[1, 1, 1, 1, 1, 0]]),
                torch.ones(1, 1, 6, 6),
                torch.zeros(1, 1, 1, 6),
                {"full_attention": torch.ones(1, 1, 6, 6)},
                torch.ones(1, 6, device="meta"),
            )
        ),
    ],
)
def test_other_batches_are_not_packed(batch):
    assert ends_of(batch) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_of_ones_says_nothing(dtype):
    batch = flattened()
    whole = batch | {"attention_mask": torch.ones(1, 50, dtype=dtype)}
    assert ends_of(whole) == ends_of(batch)
    for part, wanted in zip(parts(whole, 3), parts(batch, 3), strict=True):
        assert torch.equal(part["input_ids"], wanted["input_ids"])
        assert part["attention_mask"].shape == part["input_ids"].shape


def test_samples_are_sequences():
    batch = ours()
    assert samples_of(batch) == 6 and [*counts(batch)] == [2, 4]
    assert can_cut(batch, 5) and not can_cut(batch, 7)
    some = some_samples(batch, 3)
    assert sequences_of(some) == sequences_of(batch)[::2]
    assert some["ids"].untyped_storage().data_ptr() != batch["ids"].untyped_storage().data_ptr()
    twice = repeated(batch, 2)
    assert sequences_of(twice) == 2 * sequences_of(batch) and samples_of(twice) == 12
    larger = resized(batch, 12)
    assert larger["ids"].shape == (1, 100) and larger["cu_seqlens"].shape == (13,)
    assert larger["ids"].is_meta and larger["cu_seqlens"].dtype == torch.int64


class Reading(nn.Module):
    """Each token predicts the next one of its sequence, from the mean of those before it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, ids, labels, cu_seqlens):
        losses = []
        for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:]):
            x = self.embed(ids[0, a:b]).cumsum(0)
            losses.append(F.cross_entropy(
                self.head(x)[:-1], labels[0, a:b][1:], reduction="none", ignore_index=-100
            ))  # fmt: skip
        losses = torch.cat(losses)
        counted = sum(labels[0, a:b][1:].ne(-100).sum()
                      for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:]))  # fmt: skip
        return losses.sum() / counted


def test_gradients_of_parts_add_up_by_the_labels_that_count():
    torch.manual_seed(0)
    model, batch = Reading().double(), ours()
    batch["labels"][0, 20:30] = -100
    model(**batch).backward()
    wanted = [param.grad.clone() for param in model.parameters()]
    each = parts(batch, 3)
    for share, part in zip(shares(each, NEXT_TOKENS), each):
        for param in model.parameters():
            param.grad = None if part is each[0] and share else param.grad
        (model(**part) * float(share)).backward()
    for param, grad in zip(model.parameters(), wanted):
        torch.testing.assert_close(param.grad, grad)


def test_the_rule_of_a_packed_step_is_found():
    torch.manual_seed(0)
    step = Step(Reading(), None, ours(), forward=lambda m, b: m(**b), device=torch.device("cpu"))
    assert rule_of(step, (NEXT_TOKENS, *rules_of(step))) == NEXT_TOKENS


def test_micro_batches_for_an_accumulator():
    torch.manual_seed(0)
    model, batch = Reading(), ours()
    model(**batch).backward()
    wanted = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    accumulator = headroom.GradAccumulator(model)
    found = headroom.micro_batches(batch, 4, next_tokens=True)
    assert [weight for _, weight in found] == [
        sum(len(one) - 1 for one in sequences_of(part)) for part, _ in found
    ]
    for part, weight in found:
        if weight:
            with accumulator.micro_batch(weight=weight):
                model(**part).backward()
    accumulator.finish()
    for param, grad in zip(model.parameters(), wanted):
        torch.testing.assert_close(param.grad, grad)


def test_micro_batches_of_rows_and_of_batches_without_labels():
    labels = torch.tensor([[1, 2, -100], [-100, -100, 4], [5, 6, 7], [8, -100, -100]])
    batch = {"input_ids": torch.ones(4, 3), "labels": labels}
    assert [weight for _, weight in headroom.micro_batches(batch, 2)] == [3, 4]
    found = headroom.micro_batches(batch, 2, next_tokens=True)
    assert [weight for _, weight in found] == [2, 2]
    assert [weight for _, weight in headroom.micro_batches(torch.ones(5, 2), 2)] == [3, 2]
    with pytest.raises(ValueError, match="count is 0"):
        headroom.micro_batches(batch, 0)


@pytest.mark.slow
def test_fit_cuts_a_packed_batch():
    torch.manual_seed(0)
    config = headroom.nn.TransformerConfig(
        vocab_size=61, hidden_size=32, layers=2, heads=2, features=64
    )
    model, batch = headroom.nn.Transformer(config), ours((40, 30, 50, 20, 60, 40))

    def forward(model, batch):
        return model(batch["ids"], labels=batch["labels"], cu_seqlens=batch["cu_seqlens"])

    with pytest.raises(headroom.fitting.DoesNotFit) as refused:
        headroom.fit(model, batch, forward=forward, budget="1 KiB")
    fitted = headroom.fit(model, batch, forward=forward, budget=int(1.1 * refused.value.least))
    assert fitted.choice.micro_batches > 1
    each = fitted.micro_batches(batch)
    assert sum(map(sequences_of, each), []) == sequences_of(batch)
    wanted = float(forward(model, batch))
    assert float(fitted.step(batch)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    "ends", [[0, 12, 15, 15, 35, 40, 40], [0, 12, 15, 35], [0, 12, 15, 35, 99]]
)
def test_ends_are_those_that_the_modules_take(ends):
    """Empty sequences have no part, what lies behind the last end is a sequence, and no end is
    behind the row."""
    tokens = torch.arange(40)[None]
    batch = {"ids": tokens, "labels": tokens, "cu_seqlens": torch.tensor(ends)}
    assert ends_of(batch) == [0, 12, 15, 35, 40]
    each = parts(batch, 3)
    assert torch.equal(torch.cat([part["ids"] for part in each], 1), tokens)
    for part in each:
        assert part["cu_seqlens"][-1] == part["ids"].shape[1] == part["labels"].shape[1]
    assert sum(shares(each, NEXT_TOKENS)) == 1
    assert ends_of(batch | {"cu_seqlens": torch.tensor([0, 20, 10, 40])}) is None


def test_targets_beside_a_row_are_cut_with_it():
    batch = ours()
    labels = batch.pop("labels")
    each = parts((batch, labels), 3)
    assert torch.equal(torch.cat([target for _, target in each], 1), labels)
    assert all(named["ids"].shape == target.shape for named, target in each)
    weights = [weight for _, weight in headroom.micro_batches((batch, labels), 3)]
    assert weights == [named["ids"].shape[1] for named, _ in each]
    assert resized((batch, labels), 12)[1].shape == (1, 100)


def test_targets_of_one_dimension_beside_a_row_are_cut_with_it():
    batch = ours()
    row, cut = batch["labels"], batch | {"labels": batch["labels"][0], "soft": torch.rand(50, 3)}
    each = parts(cut, 3)
    assert torch.equal(torch.cat([part["labels"] for part in each]), row[0])
    assert torch.equal(torch.cat([part["soft"] for part in each]), cut["soft"])
    for options in ({}, {"next_tokens": True}):
        wanted = [weight for _, weight in headroom.micro_batches(batch, 3, **options)]
        assert [weight for _, weight in headroom.micro_batches(cut, 3, **options)] == wanted
    larger = resized(cut, 12)
    assert larger["labels"].shape == (100,) and larger["soft"].shape == (100, 3)


def test_the_first_token_of_a_row_of_one_sequence_is_predicted_by_nothing():
    batch = flattened()
    batch = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    for shape in ((1, 50), (50,)):
        labels = torch.ones(shape, dtype=torch.int64)
        found = headroom.micro_batches(batch | {"labels": labels}, 6, next_tokens=True)
        assert [weight for _, weight in found] == [length - 1 for length in LENGTHS]


def test_the_longest_sequence_may_be_a_tensor():
    batch = flattened(return_flash_attn_kwargs=True)
    given = batch | {"max_length_q": torch.tensor(20)}
    assert [int(part["max_length_q"]) for part in parts(given, 3)] == [
        part["max_length_q"] for part in parts(batch, 3)
    ]
