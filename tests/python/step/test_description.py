"""The description of a step: what is usual, its options in words, its copies, and its loss."""

import functools

import headroom
import pytest
import torch
from headroom.step.checks import check_described
from headroom.step.description import Step, class_of_optimizer, name_of_optimizer
from headroom.step.errors import PlanError
from headroom.step.loss import loss_of
from torch import nn

from helpers.fitting import step_of
from helpers.frozen import are_frozen


def test_what_is_usual():
    step = Step(nn.Linear(2, 2), None, None)
    usual = {name: value for name, value in vars(step).items() if name != "model"}
    flags = dict.fromkeys(("scaler", "accumulator", "release", "prefetch"), False)
    assert {name: value for name, value in usual.items() if value is not None} == flags | {
        "accumulation": 1, "set_to_none": True, "steps": 2, "rule": "samples", "state_budget": 0,
    }  # fmt: skip
    assert step.described() == {"optimizer": "none"} and are_frozen(step)


def test_options_in_words():
    step = Step(nn.Linear(2, 2), torch.optim.SGD, None)
    described = step.but(
        amp=torch.bfloat16, dtype=torch.float16, save="L2", checkpoint_every=3, max_grad_norm=0.5,
        sharding="4 by DDP", accumulation=2, accumulator=True, release=1 << 20, scaler=True,
        set_to_none=False,
    ).described()  # fmt: skip
    assert described == {
        "optimizer": "SGD", "amp": "bfloat16", "parameters in": "float16", "save": "L2",
        "checkpoint every": "3", "max grad norm": "0.5", "ranks": "4 by DDP", "accumulation": "2",
        "accumulator": "on", "release": "on", "scaler": "on", "set to none": "off",
    }  # fmt: skip


def test_names_of_optimizers():
    """Of one that was made, a class, and what makes one."""
    params = list(nn.Linear(2, 2).parameters())
    names = {
        "none": None,
        "Adam": torch.optim.Adam(params),
        "AdamW": functools.partial(torch.optim.AdamW, lr=0.1),
        "headroom.AdamW": headroom.optim.AdamW,
        "headroom.AdamW8bit": headroom.optim.AdamW8bit(params),
        "headroom.Adafactor": functools.partial(headroom.optim.Adafactor),
    }
    assert {name: name_of_optimizer(given) for name, given in names.items()} == {
        name: name for name in names
    }
    assert class_of_optimizer(names["AdamW"]) is torch.optim.AdamW


def test_a_copy_has_copies_of_what_it_is_made_of():
    step = Step(nn.Linear(2, 2), torch.optim.SGD, (1, 2), len, max, amp=torch.bfloat16)
    seen = []

    def copy(given):
        seen.append(given)
        return {name: ("copy", value) for name, value in given.items()}

    copied = step.copied(copy)
    names = {"model", "optimizer", "batch", "whole", "loss", "forward", "evaluates", "evaluated"}
    assert len(seen) == 1 and seen[0].keys() == names
    assert all(getattr(copied, name) == ("copy", getattr(step, name)) for name in seen[0])
    assert copied.amp == torch.bfloat16


class Returns(nn.Module):
    """Returns what it is told to, and notes what it was called with."""

    def __init__(self, result=lambda loss: loss):
        super().__init__()
        self.weight, self.result = nn.Parameter(torch.ones(())), result

    def forward(self, x, y=None, *, z=None):
        self.called = x, y, z
        return self.result(self.weight * 3)


class Output:
    def __init__(self, loss):
        self.loss, self.logits = loss, None


@pytest.mark.parametrize(
    "result",
    [
        lambda loss: loss,
        lambda loss: loss[None, None],
        Output,
        lambda loss: {"logits": None, "loss": loss},
        lambda loss: (loss, "other"),
        lambda loss: [loss, "other"],
    ],
)
def test_the_loss_of_an_output(result):
    assert float(loss_of(Returns(result), "x").detach()) == 3


def test_what_a_batch_gives():
    model = Returns()
    for batch, called in (
        ("x", ("x", None, None)),
        (("x", "y"), ("x", "y", None)),
        (["x"], ("x", None, None)),
        ({"x": 1, "z": 3}, (1, None, 3)),
    ):
        loss_of(model, batch)
        assert model.called == called
    for batch, called, given in (
        (("x", "y", "target"), ("x", "y", None), ("target",)),
        (["x", "target"], ("x", None, None), ("target",)),
        ("x", ("x", None, None), ()),
        ({"x": 1, "z": 3}, (1, None, 3), ({"x": 1, "z": 3},)),
    ):
        seen = []

        def loss(output, *rest, seen=seen):
            seen.append(rest)
            return output * 2

        assert float(loss_of(model, batch, loss).detach()) == 6
        assert model.called == called and seen == [given]
    assert float(loss_of(model, "x", forward=lambda m, batch: m(batch) * 5).detach()) == 15


def test_what_is_no_loss():
    def refused(words, model, batch="x", kind=PlanError, **options):
        with pytest.raises(kind, match=words):
            loss_of(model, batch, **options)

    refused(r"output of the model has shape \[4\]", Returns(lambda loss: loss.expand(4)))
    refused("output of the model is a str, and is no loss: give loss=", Returns(lambda loss: "7"))
    refused(r"the loss has shape \[2\], wanted", Returns(), loss=lambda y: y.expand(2))
    refused("the loss is a float, wanted", Returns(), forward=lambda m, x: 3.0)
    refused("cuts the graph, such as detach", Returns(lambda loss: loss.detach()))
    with torch.no_grad():
        refused("gradients are turned off here", Returns())
    refused("3 items, which are not the arguments of Returns.forward.*give loss=",
            Returns(), (1, 2, 3), TypeError)  # fmt: skip
    frozen = Returns().requires_grad_(False)
    refused("no parameter of the model does", frozen)
    assert float(loss_of(frozen, "x", trains=False)) == 3
    step = step_of(frozen, "x")
    with pytest.raises(PlanError, match="requires no gradient"):
        step.loss_of(frozen, "x")
    assert float(step.loss_of(frozen, "x", trains=False)) == 3


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_the_loss_is_computed_under_autocast(device):
    model, x = nn.Linear(3, 1), torch.randn(1, 3)
    for amp in (None, torch.bfloat16, torch.float16):
        step = step_of(model, x).but(amp=amp, device=device)
        assert step.loss_of(model, x).dtype == (amp or torch.float32)
        assert not torch.is_autocast_enabled("cpu")


def test_a_step_that_cannot_be():
    x = torch.ones(2, 3)
    good = step_of(nn.Linear(3, 1), x)

    def refused(kind, words, **changes):
        with pytest.raises(kind, match=words):
            check_described(good.but(**changes))

    refused(TypeError, "model is int, wanted a torch.nn.Module", model=3)
    refused(ValueError, r"in eval\(\)", model=nn.Linear(3, 1).eval())
    refused(ValueError, "sample_batch is None", batch=None)
    for batch in ((), [3], {"a": "b"}, torch.utils.data.TensorDataset(x), x.numpy()):
        refused(TypeError, f"sample_batch is a {type(batch).__name__} without", batch=batch)
    refused(ValueError, "loss and forward were both", loss=len, forward=len)
    refused(TypeError, "loss is 3, wanted a function", loss=3)
    refused(TypeError, "forward is 3, wanted a function", forward=3)
    for amp in ("bfloat16", torch.int8):
        refused(TypeError, f"amp is {amp!r}, wanted a dtype", amp=amp)
    refused(TypeError, "scaler is True, wanted a torch.amp.GradScaler", scaler=True)
    refused(TypeError, "max_grad_norm must be a norm above 0, got '1'", max_grad_norm="1")
    for norm in (0, -1.5, float("nan")):
        refused(ValueError, f"max_grad_norm is {norm}, wanted a norm above 0", max_grad_norm=norm)
    for changes in (
        {"batch": object()},  # whose tensors may be anywhere
        {"batch": {"a": ["b", x]}},
        {"scaler": torch.amp.GradScaler("cpu"), "max_grad_norm": 0.1, "amp": torch.float16},
        {"scaler": None, "loss": len, "max_grad_norm": float("inf")},
        {"forward": len, "max_grad_norm": 1},
    ):
        check_described(good.but(**changes))
