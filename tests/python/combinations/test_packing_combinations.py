"""Packed rows by every kind of mask, and micro-batches of batches of every layout, against each
sequence alone and the whole batch in float64."""

import headroom
import pytest
import torch
from headroom.integrations.transformers import register_attention
from torch import nn

from helpers.combined import combinations, distance, gradients

LENGTHS = ((5, 2, 4), (3, 1, 7))  # of each row
TOKENS = 11


def mask_of(kind, padding, left):
    """A mask of two rows with places for padding, and what hides nothing in it."""
    documents = torch.stack(
        [torch.arange(1, 4).repeat_interleave(torch.tensor(each)) for each in LENGTHS]
    )
    seen = documents if kind == "documents" else torch.ones_like(documents)
    beside = torch.zeros(2, padding, dtype=seen.dtype)
    seen = torch.cat((beside, seen) if left else (seen, beside), 1)
    return {"none": None, "bool": seen.bool(), "float32": seen.float()}.get(kind, seen)


def put(values, fill, padding, left):
    beside = torch.full((len(values), padding), fill)
    return torch.cat((beside, values) if left else (values, beside), 1)


@combinations(
    {
        "name": ["Llama", "Mistral", "Gemma3", "GPT2"],
        "save": [None, "L0", "L1", "L5"],
        "mask": ["none", "int64", "bool", "float32", "documents"],
        "padding": [0, 3],
        "left": [False, True],
        "fill": [0, 1],
        "start": [0, 2],
        "rows": [1, 2],
        "cache": [False, None],
    },
    possible=lambda mask, padding, left, fill, **_: (
        (mask != "none" or not padding) and (padding or not (left or fill))
    ),
)
def test_sequences_of_packed_rows_do_not_see_each_other(case):
    pytest.importorskip("transformers")
    from helpers.hf_models import model_of

    padding, left, rows = case["padding"], case["left"], case["rows"]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (rows, TOKENS), generator=generator)
    alone = [torch.arange(n) + case["start"] for n in LENGTHS[0] + LENGTHS[1]]
    positions = torch.stack([torch.cat(alone[:3]), torch.cat(alone[3:])])[:rows]
    mask = mask_of(case["mask"], padding, left)
    model = model_of(case["name"]).eval()
    options = {} if case["cache"] is None else {"use_cache": case["cache"]}
    with torch.no_grad():
        wanted = [
            model(input_ids=one[None], position_ids=at[None], use_cache=False).logits[0]
            for row, lengths in zip(ids, LENGTHS)
            for one, at in zip(row.split(lengths), alone[3 * (lengths is LENGTHS[1]) :])
        ]
        if case["save"] is None:
            model.set_attn_implementation(register_attention())
        else:
            headroom.patch(model, case["save"])
        logits = model(
            input_ids=put(ids, 0, padding, left),
            position_ids=put(positions, case["fill"], padding, left),
            attention_mask=None if mask is None else mask[:rows],
            **options,
        ).logits
    start = padding if left else 0
    found = logits[:, start : start + TOKENS].flatten(0, 1)
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=5e-5)


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(61, 8), nn.Embedding(32, 8)
        self.head = nn.Linear(8, 61)

    def forward(self, input_ids, labels, position_ids=None, attention_mask=None, hidden=None, **_):
        x = self.words(input_ids)
        if position_ids is not None:
            places = self.places(position_ids)
            x = x + (places.sum(0) if position_ids.dim() == 3 else places)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        if hidden is not None:
            x = x + hidden.sum(0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


PLACES = {
    "none": lambda rows: None,
    "two": lambda rows: torch.arange(TOKENS).expand(rows, TOKENS) + torch.arange(rows)[:, None],
    "of all": lambda rows: torch.arange(TOKENS)[None],
    "three": lambda rows: torch.arange(3 * rows * TOKENS).view(3, rows, TOKENS) % 31,
    "four": lambda rows: torch.arange(4 * rows * TOKENS).view(4, rows, TOKENS) % 31,
    "three of all": lambda rows: torch.arange(3 * TOKENS).view(3, 1, TOKENS) % 31,
}
HOLDERS = {
    "dict": lambda batch: batch,
    "list": lambda batch: [batch],
    "nested": lambda batch: ({"text": batch}, "a string"),
}


def inner(held):
    held = held[0] if isinstance(held, (list, tuple)) else held
    return held.get("text", held)


@combinations(
    {
        "places": [*PLACES],
        "first": ["position_ids", "input_ids", "labels", "attention_mask", "cache_position"],
        "holder": [*HOLDERS],
        "rows": [2, 3, 4, 5, TOKENS],
        "count": [2, 3, 5],
        "mask": [False, True],
        "hidden": [None, 2, 3],
        "labels": ["all", "some"],
    },
    possible=lambda hidden, rows, **_: hidden != rows,  # nothing tells layers from rows then
)
def test_micro_batches_of_every_layout_add_up(case):
    rows = case["rows"]
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(61, (rows, TOKENS), generator=generator)
    labels = ids.clone()
    if case["labels"] == "some":
        labels[torch.rand(ids.shape, generator=generator) < 0.6] = -100
    every = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": PLACES[case["places"]](rows),
        "attention_mask": torch.rand(rows, TOKENS, generator=generator) if case["mask"] else None,
        "cache_position": torch.arange(TOKENS) if case["first"] == "cache_position" else None,
        "number": torch.tensor(3),
    }
    if case["hidden"]:
        every["hidden"] = torch.rand(case["hidden"], rows, TOKENS, 8, generator=generator)
    batch = {name: x for name, x in every.items() if x is not None}
    batch = {case["first"]: batch.get(case["first"])} | batch
    held = HOLDERS[case["holder"]](batch)

    whole, model = Reading(), Reading()
    whole(**inner(held)).backward()
    accumulator = headroom.GradAccumulator(model)
    cut = headroom.micro_batches(held, case["count"])
    if case["holder"] != "dict":  # where no labels are found, weights are numbers of samples
        cut = [(part, int(inner(part)["labels"].ne(-100).sum())) for part, _ in cut]
    assert len(cut) == -(-rows // -(-rows // case["count"]))
    for part, weight in cut:
        with accumulator.micro_batch(weight=weight):
            model(**inner(part)).backward()
    accumulator.finish()
    assert distance(gradients(model), gradients(whole)) <= 1e-6
