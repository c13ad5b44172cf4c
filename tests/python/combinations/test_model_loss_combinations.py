"""Models of transformers under ``patch(loss=True)``: their own loss or that of their class, in
training and in evaluation, with whatever a caller gives, is that of the same model unpatched."""

import copy
from contextlib import nullcontext

import headroom
import pytest
import torch
import torch.nn.functional as F

from helpers.combined import combinations
from helpers.hf_models import MODELS, inputs_of, model_of

transformers = pytest.importorskip("transformers")


def focal(logits, labels, vocab_size=None, **options):
    """A loss that is no cross entropy, though near to it."""
    logp = logits[:, :-1].float().log_softmax(-1)
    found = -logp.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    counts = labels[:, 1:] != -100
    return ((1 - (-found).exp()) * found * counts).sum() / counts.sum()


def overridden(kind):
    def forward(self, *args, **kwargs):
        out = kind.forward(self, *args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss + 0.1 * out.logits.float().square().mean()
        return out

    return forward


OWN = {
    "none": lambda model: None,
    "function": lambda model: setattr(model, "loss_function", focal),
    "class": lambda model: setattr(
        model,
        "__class__",
        type("Own", (type(model),), {"loss_function": property(lambda self: focal)}),
    ),
    "forward": lambda model: setattr(
        model, "__class__", type("Own", (type(model),), {"forward": overridden(type(model))})
    ),
}
GIVEN = {
    "nothing": lambda inputs: {},
    "items": lambda inputs: {"num_items_in_batch": torch.tensor(9)},
    "ignored": lambda inputs: {
        "ignore_index": 7,
        "labels": inputs["labels"].masked_fill(inputs["labels"] == -100, 7),
    },
    "shifted": lambda inputs: {
        "shift_labels": F.pad(inputs["labels"][:, 1:], (0, 1), value=-100).roll(1, 0)
    },
    "kept": lambda inputs: {"logits_to_keep": 0},
}


@combinations(
    {
        "name": [*MODELS],
        "own": [*OWN],
        "when": ["before", "after"],  # the loss is made its own, and patched
        "given": [*GIVEN],
        "mode": ["train", "eval", "inference"],
        "autocast": [False, True],
    },
    full=60,
    possible=lambda name, own, when, given, mode, **_: (
        (name != "Bert" or given in ("nothing", "ignored"))
        and (own != "forward" or when == "before")  # what takes another class is patched anew
        and (given != "shifted" or own in ("none", "forward"))
    ),
)
def test_the_loss_is_that_of_the_model_unpatched(case):
    transformers.utils.logging.set_verbosity_error()
    model = model_of(case["name"])
    other = copy.deepcopy(model)
    OWN[case["own"]](model)
    steps = [lambda: OWN[case["own"]](other), lambda: headroom.patch(
        other, "L0", norms=False, glu=False, rope=False, loss=True
    )]  # fmt: skip
    for step in steps if case["when"] == "before" else reversed(steps):
        step()
    inputs = inputs_of(padded=True)
    given = inputs | GIVEN[case["given"]](inputs)
    model.train(case["mode"] == "train"), other.train(case["mode"] == "train")
    around = {"train": nullcontext, "eval": torch.no_grad, "inference": torch.inference_mode}
    with around[case["mode"]](), torch.autocast("cpu", torch.bfloat16, enabled=case["autocast"]):
        want, got = model(**given), other(**given)
        off = 2e-2 if case["autocast"] else 1e-5
        torch.testing.assert_close(got.loss.float(), want.loss.float(), rtol=off, atol=off)
        if case["mode"] != "train":
            torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=0)
