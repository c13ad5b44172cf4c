"""Tensors in nested containers, and in the calls of blocks."""

import collections
import copy
import dataclasses
import threading
from typing import Any

import torch
from headroom.step.calls import Call, described, results_of
from headroom.step.calls import tensors_of as tensors_of_call
from headroom.step.pytree import map_tensors, plain_tensors, tensors_in
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


class Listed(list):
    """A list of a class that torch does not know."""


def numbers(value):
    return [float(x) for x in tensors_in(value)]


def test_tensors_in_containers_of_all_kinds():
    a, b, c = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)
    assert numbers(a) == [1]
    assert numbers({"x": a, "y": [b, (c, "text", None)]}) == [1, 2, 3]
    assert numbers(Pair(a, [b])) == [1, 2]
    assert numbers(collections.UserDict(x=[a], y=b)) == [1, 2]
    assert numbers(Listed([a, {"x": b}])) == [1, 2]
    assert numbers({a}) == numbers(frozenset([a])) == [1]
    assert numbers(Batch(a, Batch([b]))) == [1, 2]
    unset = Batch(Batch(a))
    del unset.x.__dict__["y"]
    assert numbers(unset) == numbers(map_tensors(unset, lambda t: t)) == [1]
    assert numbers([Batch, object(), a, 3]) == [1]


def test_containers_with_other_tensors_are_of_their_own_classes():
    other, x, y = object(), torch.tensor(1.0), torch.tensor(2.0)
    for given in (
        x, [x, y, other], (x, {"y": y}), {"x": x, "other": other}, Pair(x, y), Listed([x, [y]]),
        collections.UserDict(x=x, y=[y], other=other), Batch(x, [y]), Frozen(Batch(x, other)),
    ):  # fmt: skip
        before = numbers(given)
        made = map_tensors(given, lambda t: -t)
        assert type(made) is type(given) and made is not given
        assert numbers(made) == [-n for n in before] and numbers(given) == before
        assert type(getattr(made, "x", None)) is type(getattr(given, "x", None))
    assert map_tensors([other, Batch], lambda t: None) == [other, Batch]
    assert map_tensors(collections.UserDict(x=x, y=other), lambda t: 3) == {"x": 3, "y": other}
    assert map_tensors(Listed([x, other]), lambda t: 3) == [3, other]


def test_what_a_tensor_consists_of():
    x, y = torch.ones(2), torch.zeros(2)
    two = TwoTensor(x, TwoTensor(y, x))
    assert [id(part) for part in plain_tensors(two)] == [id(x), id(y), id(x)]
    for plain in (x, nn.Parameter(x), nn.Buffer(y)):
        assert plain_tensors(plain)[0] is plain and len(plain_tensors(plain)) == 1


class Cache:
    """What a call may write to."""

    def __init__(self, *tensors):
        self.tensors, self.length = list(tensors), 3


class Locked(Cache):
    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.lock = threading.Lock()  # which cannot be copied


def test_the_arguments_of_a_call_are_kept_without_their_graph():
    x = torch.randn(3, requires_grad=True)
    cache, module, mask = Cache(x * 3), nn.Linear(2, 2), torch.ones(3)
    call = Call((x * 2, [mask, 7], module), {"cache": cache, "pair": Pair(mask, "m")}, x.device)
    for _ in range(2):
        (first, (kept_mask, number), same), kwargs = call.fresh()
        assert first.requires_grad and not first.is_leaf and torch.equal(first, x * 2)
        first.add_(1)  # as a block may; the next call gets what was there
        assert kept_mask.data_ptr() == mask.data_ptr() and not kept_mask.requires_grad
        assert number == 7 and same is module and type(kwargs["pair"]) is Pair
        assert torch.equal(kwargs["pair"].a, mask) and kwargs["pair"].b == "m"
        renewed = kwargs["cache"]
        assert type(renewed) is Cache and renewed is not cache and renewed.length == 3
        assert torch.equal(renewed.tensors[0], x * 3) and renewed.tensors[0].requires_grad
        renewed.length, renewed.tensors = 4, []
        torch.autograd.grad(first.sum(), first)
    assert cache.length == 3 and x.grad is None
    locked = Locked(mask)
    assert Call((locked,), {}, x.device).fresh()[0][0] is locked
    function = copy.copy
    assert Call((function, torch.float32), {}, x.device).fresh()[0] == (function, torch.float32)


def test_the_settings_of_a_call():
    x = torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        call = Call((x,), {}, x.device)
    with call.settings.restored():
        assert (x @ x).dtype == torch.bfloat16


def test_tensors_of_what_a_call_has():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2)
    cache = Cache(x, {"y": y})
    cache.itself, cache.module = cache, nn.Linear(1, 1)
    assert [id(t) for t in tensors_of_call([cache, (cache,), 3])] == [id(x), id(y)]
    assert [id(t) for t in tensors_of_call([{"x": {x}}, torch.float32, Cache])] == [id(x)]
    assert results_of((cache, y)) == [x] and results_of((3, y)) == []


def test_what_leads_to_other_costs_is_described():
    x = torch.ones(2, 3)
    same = [x, torch.zeros(2, 3)], {"a": x, 1: (2, "b")}, Batch(x, None), torch.float32, Cache(x)
    assert described(same) == described(copy.deepcopy(same)) and hash(described(same)) is not None
    for a, b in (
        (x, x[:1]), (x, x.t().contiguous().t()), (x, x.double()), (x, nn.Parameter(x)), (1, 2),
        ("a", "b"), (None, 0), ([x], [x, x]), ({"a": x}, {"b": x}), ({"a": 1}, {"a": 2}),
        (Batch(x), Batch(x, x)), (Cache(x), nn.Linear(1, 1)), (torch.float32, torch.float16),
        (x.device, torch.device("meta")), (1.5, 2.5), ((x, 1), (x, 2)),
    ):  # fmt: skip
        assert described(a) != described(b), (a, b)
    assert described(Cache(x)) == described(Cache()) == "Cache"
    assert described(Batch) == "type"
