"""Which changes are named where memory has run out, and in which order."""

from types import SimpleNamespace

import pytest
import torch
from headroom.planning import oom_advice as module
from torch import nn


def advice(name, size, time):
    return SimpleNamespace(name=name, bytes=size, time=time, code=f"use({name})\nagain()")


@pytest.fixture
def planned(monkeypatch):
    """What is planned, and the advice that there is."""
    asked, found = [], []

    def plan(*args, **options):
        asked.append((args, options))
        return SimpleNamespace(advice=lambda: found)

    monkeypatch.setattr(module, "plan", plan)
    return asked, found


def test_the_cheapest_ways_that_save_enough_come_first(planned):
    asked, found = planned
    found += [
        advice("other", 900, "another training: adapters alone"),
        advice("small", 99, "no slower"), advice("dear", 500, "about 25 % slower"),
        advice("cheap", 100, "about 7.5 % slower"), advice("free", 100, "no slower"),
        advice("tiny", 1, "about 1 % slower"),
    ]  # fmt: skip
    model, optimizer = nn.Linear(2, 2), object()
    lines = module.oom_advice(model, [optimizer], "batch", 100)
    assert lines == [
        "The cheapest ways out, each planned by itself for a step of this shape:",
        "1. free: 100 B less, no slower", "       use(free)", "       again()",
        "2. cheap: 100 B less, about 7.5 % slower", "       use(cheap)", "       again()",
        "3. dear: 500 B less, about 25 % slower", "       use(dear)", "       again()",
    ]  # fmt: skip
    (args, options) = asked[0]
    assert args == (model, optimizer, "batch") and options["device"] == "cpu"
    loss = options["forward"](
        lambda x, y: (x * 2, y, x.detach()), ((torch.ones(3, requires_grad=True),), {"y": 1})
    )
    assert float(loss.detach()) == 6
    module.oom_advice(model, [], "batch", 100)
    assert asked[1][0] == (model, None, "batch")
    with pytest.raises(ValueError, match="requires no gradient"):
        options["forward"](lambda x: x, ((torch.ones(3),), {}))


def test_where_nothing_is_advised(planned):
    model = nn.Linear(2, 2)
    assert module.oom_advice(model, [], "x", 1) == [
        "Of the changes that were planned, none would make the step smaller."
    ]
    with pytest.raises(ValueError, match="there are several optimizers"):
        module.oom_advice(model, [1, 2], "x", 1)
