"""Regions that are dropped and computed again: gradients keep their bits, nothing stays behind."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from headroom._core.recompute import Dropping, can_drop, inside_checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from helpers.bits import assert_same_bits
from helpers.dropping import WRITTEN_LATE, WrittenLate, gradients_of


class Layer(nn.Module):
    """Two regions, the second of which takes a result of the first, and an operation that saves
    results of both."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 12), nn.Linear(6, 6)
        self.dropout = dropout
        self.calls = {"split": 0, "mixed": 0}

    def split(self, x):
        self.calls["split"] += 1
        return F.dropout(torch.tanh(self.first(x)), self.dropout).split(6, dim=-1)

    def mixed(self, x, a):
        self.calls["mixed"] += 1
        return x + torch.sigmoid(self.second(a))

    def forward(self, x, drop=True):
        if not drop:
            a, b = self.split(x)
            return (self.mixed(x, a) * b).exp() * b.transpose(0, 1).transpose(0, 1)
        with Dropping() as dropping:
            a, b = dropping.run(self.split, x, random=self.dropout > 0)
            c = dropping.run(self.mixed, x, a)
            return (c * b).exp() * b.transpose(0, 1).transpose(0, 1)


def inputs():
    torch.manual_seed(2)
    return torch.randn(5, 6, requires_grad=True)


def taken(layer, x):
    """The gradients that were made, which are gone then."""
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    x.grad = None
    return grads


def gradients(layer, x, **options):
    layer(x, **options).square().sum().backward()
    return taken(layer, x)


def kept_elements(function):
    """Of memory that the graph of a result holds, parameters aside. Keeps the result alive."""
    seen = {}

    def pack(x):
        if x._base is None or not x._base.is_leaf:
            seen[x.untyped_storage().data_ptr()] = x, x.untyped_storage().nbytes() // 4
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = function()
    return sum(n for x, n in seen.values() if not isinstance(x, nn.Parameter)), result


@pytest.fixture
def live():
    """Counts the tensors that were made since the test began and are alive, without the help of the
    garbage collector."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield lambda: sum(type(o) is torch.Tensor for o in gc.get_objects())
    gc.enable()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_keep_their_bits(dropout):
    layer, x = Layer(dropout), inputs()
    torch.manual_seed(3)
    wanted = gradients(layer, x, drop=False)
    torch.manual_seed(3)
    assert_same_bits(gradients(layer, x), wanted)
    assert layer.calls == {"split": 3, "mixed": 3}


def test_the_generator_is_kept_only_where_numbers_were_drawn():
    layer, x = Layer(), inputs()
    layer.dropout = 0.5
    with Dropping() as dropping:
        a, b = dropping.run(layer.split, x, random=True)
        c = dropping.run(layer.mixed, x, a, random=True)
        regions = [result.region for result in dropping._results.values()]
    assert [region.random is not None for region in dict.fromkeys(regions)] == [True, False]
    assert (a * b * c).isfinite().all()


def test_results_are_dropped():
    layer, x = Layer(), inputs()
    full, _ = kept_elements(lambda: layer(x, drop=False))
    kept, _ = kept_elements(lambda: layer(x))
    assert full == 30 + 60 + 30 + 30 + 30  # x, a and b, sigmoid, c, exp
    assert kept == 30 + 30  # x, exp


def test_outer_hooks_get_what_is_kept():
    layer, x = Layer(), inputs()
    wanted = gradients(layer, x, drop=False)
    with save_on_cpu():
        y = layer(x)
    y.square().sum().backward()
    assert_same_bits(taken(layer, x), wanted)


def test_an_input_that_outer_hooks_return_in_another_order():
    """What is computed again from it lies in that order too."""
    x = inputs()
    with saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x), Dropping() as dropping:
        y = dropping.run(torch.exp, x.t())
    y.sum().backward()
    assert_same_bits(x.grad, x.exp())


def test_a_graph_is_used_twice():
    layer, x = Layer(), inputs()
    wanted = gradients(layer, x, drop=False)
    y = layer(x).square().sum()
    for _ in range(2):
        y.backward(retain_graph=True)
        assert_same_bits(taken(layer, x), wanted)


def test_a_layer_is_used_twice():
    layer, x = Layer(), inputs()
    wanted = gradients(lambda_layer(layer, drop=False), x)
    assert_same_bits(gradients(lambda_layer(layer), x), wanted)


def lambda_layer(layer, **options):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(self.layer(x, **options).cos(), **options)

    return Twice()


def test_a_part_of_a_graph_leaves_nothing(live):
    layer, x = Layer(), inputs()
    with Dropping() as dropping:
        a, b = dropping.run(layer.split, x)
        left, right = a.square(), b.square()
    (wanted,) = torch.autograd.grad(layer.split(x)[0].square().sum(), x)
    before = live()
    (got,) = torch.autograd.grad(left.sum(), x, retain_graph=True)
    assert_same_bits([got], [wanted])
    del got
    assert live() == before
    assert torch.autograd.grad(right.sum(), x)[0].isfinite().all()


def test_nothing_is_left_after_a_backward_pass(live):
    layer, x = Layer(), inputs()
    gradients(layer, x)
    before = live()
    gradients(layer, x)
    assert live() == before
    layer(x)
    assert live() == before


@pytest.mark.parametrize("where", ["recomputation", "behind"])
def test_an_exception_leaves_nothing(where, live):
    layer, x = Layer(), inputs()
    wanted = gradients(layer, x, drop=False)

    class Fails(Exception):
        pass

    def fail(*_):
        raise Fails

    y = layer(x)
    before = live()
    with pytest.raises(Fails), contextlib.ExitStack() as stack:
        if where == "recomputation":
            stack.callback(layer.second.register_forward_hook(fail).remove)
        else:  # the node of `first`, which runs when both regions have been computed again
            stack.callback(layer.first.weight.register_hook(fail).remove)
        y.square().sum().backward(retain_graph=True)
    taken(layer, x)
    assert live() == before
    y.square().sum().backward()
    assert_same_bits(taken(layer, x), wanted)


def test_autocast_is_restored():
    layer, x = Layer(), inputs()

    def run(drop):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, drop=drop)
        y.float().square().sum().backward()
        return taken(layer, x)

    assert_same_bits(run(True), run(False))


def test_autocast_may_change_between_regions():
    layer, x = Layer(), inputs()
    with Dropping() as dropping:
        a = dropping.run(layer.first, x)
        with torch.autocast("cpu", torch.bfloat16):
            b = dropping.run(layer.first, x)
        y = a.square() + b.square()
    wanted = torch.autograd.grad(a, x, 2 * a, retain_graph=True)[0]
    wanted = wanted + torch.autograd.grad(b, x, (2 * b.float()).to(b.dtype), retain_graph=True)[0]
    (got,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


def test_results_changed_in_place_are_kept():
    layer, x = Layer(), inputs()

    def loss(run):
        a = run(layer.first, x)
        return a.mul_(2).square().sum() + a.exp_().sum()

    with Dropping() as dropping, pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(loss(dropping.run), x)  # square wants what exp_ has overwritten

    def loss(run):
        a = run(layer.first, x)
        return a.mul_(2).square().sum()

    wanted = torch.autograd.grad(loss(lambda f, x: f(x)), x)
    with Dropping() as dropping:
        got = torch.autograd.grad(loss(dropping.run), x)
    assert_same_bits(got, wanted)


@pytest.mark.parametrize("what", ["input", "kept"])
def test_kept_tensors_changed_in_place_raise(what):
    layer, x = Layer(), inputs()
    x = x * 1
    with Dropping() as dropping:
        a, _ = dropping.run(layer.split, x)
        y = a.square().exp()
    (x if what == "input" else y).detach().zero_()
    with pytest.raises(
        RuntimeError, match="inplace operation: .* at version 1; expected version 0"
    ):
        y.sum().backward()


def test_a_function_that_computes_something_else_raises():
    x = inputs()
    width = 6

    with Dropping() as dropping:
        y = dropping.run(lambda x: x[:, :width] * 2, x)
        z = dropping.run(lambda x: torch.tanh(x[:, :width]) * 2, x)
        y, z = y.square(), z.sum()
    width = 3
    with pytest.raises(RuntimeError, match=r"shape \[5, 3\] in the backward pass, .* \[5, 6\]"):
        z.backward()

    with Dropping() as dropping:
        z = dropping.run(lambda x: torch.tanh(x) if width == 3 else x, x).sum()
    width = 4
    with pytest.raises(RuntimeError, match="saved 0 tensors in the backward pass, wanted"):
        z.backward()


def test_a_region_ends_once_everything_is_there():
    layer, x = Layer(), inputs()
    ran = []

    def region(x):
        y = torch.tanh(layer.first(x))
        ran.append("middle")
        y = F.linear(y.square(), torch.ones(6, 12))  # saves nothing behind
        ran.append("end")
        return y

    with Dropping() as dropping:
        y = dropping.run(region, x, keep_results=True)
        z = y.exp() + y.square()
    del ran[:]
    z.sum().backward()
    assert ran == ["middle"]


@pytest.mark.parametrize("keep_results", [False, True])
@pytest.mark.parametrize("place", ["alone", "middle", "end"])
@pytest.mark.parametrize("name", WRITTEN_LATE)
def test_what_an_operation_writes_after_it_saved_it(name, place, keep_results):
    def run(layer, x):
        with Dropping() as dropping:
            return dropping.run(layer, x, random=True, keep_results=keep_results)

    layer = WrittenLate(name, place)
    wanted = gradients_of(lambda layer, x: layer(x), copy.deepcopy(layer))
    assert_same_bits(gradients_of(run, layer), wanted)


def test_what_is_changed_in_place_after_it_was_saved_raises():
    """As in torch, which tells by the version of what is kept."""

    def function(x):
        h = x * 2
        y = h.sin()
        return (y + h.add_(1)).exp()

    x = inputs()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x).sum().backward()
    with Dropping() as dropping:
        y = dropping.run(function, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*version 1; expected"):
        y.sum().backward()


def test_the_order_of_backends_moves_in_the_first_run():
    """As torch moves it in the first call of attention on some devices, to cuDNN before others."""
    order = torch._C._get_sdp_priority_order()
    later = [3, *(k for k in order if k != 3)]
    calls = []

    def attention(x):
        if not calls:
            torch._C._set_sdp_priority_order(later)
        calls.append(torch._C._get_sdp_priority_order())
        if calls[-1][0] == 3:
            return x.exp()
        return (x * x).sum() + x  # which saves another tensor

    x = inputs()
    try:
        with Dropping() as dropping:
            y = dropping.run(attention, x, keep_results=True)
        torch._C._set_sdp_priority_order(order)  # which is not theirs
        y.sum().backward()
        assert torch.equal(x.grad, x.detach().exp()) and calls == [later, later]
        assert torch._C._get_sdp_priority_order() == order
    finally:
        torch._C._set_sdp_priority_order(order)


def test_results_can_be_kept():
    layer, x = Layer(), inputs()

    def region(x):
        return layer(x, drop=False)

    def whole(keep_results):
        with Dropping() as dropping:
            return dropping.run(region, x, keep_results=keep_results).square()

    assert kept_elements(lambda: whole(True))[0] == 30 + 30
    kept, y = kept_elements(lambda: whole(False))
    assert kept == 30
    wanted = torch.autograd.grad(layer(x, drop=False).square().sum(), x)
    assert_same_bits(torch.autograd.grad(y.sum(), x), wanted)
    assert_same_bits(torch.autograd.grad(whole(True).sum(), x), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant):
    layer, x = Layer(), inputs()
    wanted = gradients(layer, x, drop=False)
    seen = []

    def region(x):
        seen.append(torch.is_grad_enabled() and inside_checkpoint())
        return layer(x)  # drops although it should not: right, if slow

    checkpoint(region, x, use_reentrant=reentrant).square().sum().backward()
    assert_same_bits(taken(layer, x), wanted)
    assert seen == [not reentrant, True]


def test_can_drop():
    found = []
    assert can_drop()
    with torch.no_grad():
        assert not can_drop()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not can_drop()
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert can_drop()
    torch.func.vmap(lambda x: [x, found.append(can_drop())][0])(torch.ones(2))
    assert found == [False]


def test_a_saved_tensor_is_read_outside_of_a_backward_pass():
    layer, x = Layer(), inputs()
    with Dropping() as dropping:
        a, _ = dropping.run(layer.split, x)
        y = a.square()
    assert_same_bits([y.grad_fn._saved_self], [a])
    wanted = torch.autograd.grad(layer.split(x)[0].square().sum(), x)
    assert_same_bits(torch.autograd.grad(y.sum(), x), wanted)


def test_without_gradients_nothing_is_kept(live):
    layer, x = Layer(), inputs()
    before = live()
    with torch.no_grad(), Dropping() as dropping:
        dropping.run(layer.split, x)
    assert live() == before
    layer(x.detach().requires_grad_(False))
    gradients(layer, x)
