"""headroom.linear_cross_entropy by each way that torch has to a gradient, and what it costs."""

import headroom
import pytest
import torch
from headroom.functional import linear_cross_entropy as ops
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.linear_cross_entropy import CLASSES, CUTS, DTYPES, FEATURES, ROWS, sample


def test_frozen_inputs_and_evaluation_cost_less(device):
    leaves, target, _ = sample(device=device)
    x, w, _ = leaves
    product = 2 * ROWS * FEATURES * CLASSES

    def counted(x, w, backward=True, **options):
        with FlopCounterMode(display=False) as counter:
            loss = headroom.linear_cross_entropy(x, w, target, **options)
            if backward:
                loss.sum().backward()
        return counter.get_total_flops() / product

    assert counted(x, w) == 3
    assert counted(x, w.detach()) == 2
    assert counted(x, w, reduction="none") == 4
    assert counted(x, w, accumulate_into_grad=True) == 4
    assert counted(x.detach(), w, accumulate_into_grad=True) == 3
    with torch.no_grad():
        assert counted(x, w, backward=False) == 1
    whole = torch.autograd.grad(headroom.linear_cross_entropy(x, w, target), (x, w))
    for k, given in enumerate(((x, w.detach()), (x.detach(), w))):
        loss = headroom.linear_cross_entropy(*given, target)
        assert torch.equal(torch.autograd.grad(loss, given[k])[0], whole[k])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_that_is_retained_gives_the_same_again(dtype, device):
    leaves, target, _ = sample(dtype, device)
    x, w, b = leaves
    loss = headroom.linear_cross_entropy(x, w, target, b)
    first = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    again = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    last = torch.autograd.grad(loss + 2 * loss, leaves)
    for one, two, three in zip(first, again, last):
        assert torch.equal(one, two) and torch.equal(one, three)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_checkpoint_autocast_and_compile(device):
    leaves, target, _ = sample(device=device)
    x, w, b = leaves

    def loss(x, w, b):
        return headroom.linear_cross_entropy(x, w, target, b, z_loss=0.1, stats=("lse",))[0]

    wanted = torch.autograd.grad(loss(x, w, b), leaves)
    again = torch.autograd.grad(checkpoint(loss, x, w, b, use_reentrant=False), leaves)
    assert all(torch.equal(got, value) for got, value in zip(again, wanted))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, value in zip(torch.autograd.grad(compiled(x, w, b), leaves), wanted):
        torch.testing.assert_close(got, value)
    with torch.autocast(x.device.type, torch.bfloat16):
        cast = loss(x, w, b)
    narrow = [t.bfloat16() for t in leaves]
    assert torch.equal(cast, loss(*narrow)) and cast.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(cast, leaves))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_straight_into_grad(cut, dtype, device):
    leaves, target, _ = sample(dtype, device)
    x, w, b = leaves
    wanted = torch.autograd.grad(
        2 * headroom.linear_cross_entropy(x, w, target, b, **CUTS[cut]), leaves
    )
    for times in (1, 2):
        x.grad = None
        address = None if w.grad is None else w.grad.data_ptr()
        loss = headroom.linear_cross_entropy(
            x, w, target, b, accumulate_into_grad=True, **CUTS[cut]
        )
        (2 * loss).backward()
        assert address in (None, w.grad.data_ptr())
        for leaf, value, factor in zip(leaves, wanted, (1, times, times)):
            eps = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                leaf.grad, value * factor, rtol=eps, atol=eps * value.abs().max().item()
            )


def test_gradients_into_grad_are_refused_where_there_is_none(device):
    """Before anything is written."""
    leaves, target, _ = sample(device=device)
    x, w, b = leaves

    def loss(x, w, b):
        return headroom.linear_cross_entropy(x, w, target, b, accumulate_into_grad=True)

    with pytest.raises(RuntimeError, match="backward without create_graph=True"):
        torch.autograd.grad(loss(x, w, b), x, create_graph=True)
    with pytest.raises(ValueError, match="which torch.func does not return; leave it out"):
        torch.func.grad(loss, (0, 1, 2))(x, w, b)
    with pytest.raises(RuntimeError, match="which torch.compile cannot see"):
        torch.compile(loss, fullgraph=True, backend="eager")(x, w, b)
    assert all(leaf.grad is None for leaf in leaves)


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_loss_that_gets_no_gradient_adds_none(device):
    leaves, target, _ = sample(device=device)
    x, w, b = leaves
    loss = headroom.linear_cross_entropy(x, w, target, b, accumulate_into_grad=True)
    WithoutGradient.apply(loss).backward()
    assert all(leaf.grad is None for leaf in leaves)


def test_grads_that_cannot_be_added_to_are_named(device):
    leaves, target, _ = sample(device=device)
    x, w, b = leaves

    def refused(words, weight=w, bias=b):
        kept = [None if t.grad is None else t.grad.clone() for t in (weight, bias)]
        with pytest.raises(ValueError, match=words):
            headroom.linear_cross_entropy(x, weight, target, bias, accumulate_into_grad=True)
        for t, grad in zip((weight, bias), kept):
            assert (t.grad is None) == (grad is None) and (grad is None or t.grad.equal(grad))

    w.grad = torch.ones_like(w).T.contiguous().T
    refused(r"weight.grad is a torch.float32 tensor with strides \(1, 211\), wanted a contiguous")
    w.grad = None
    b.grad = torch.ones(2 * len(b), device=device)[::2]
    refused("bias.grad is a torch.float32 tensor with strides")
    narrow = b.detach().bfloat16().requires_grad_()
    narrow.grad_dtype = None
    narrow.grad = torch.ones_like(narrow).float()
    with pytest.raises(ValueError, match="bias.grad is a torch.float32 .* in torch.bfloat16"):
        headroom.linear_cross_entropy(
            *(x.bfloat16(), w.detach().bfloat16(), target, narrow), accumulate_into_grad=True
        )
    half = [t.detach().half().requires_grad_() for t in leaves]
    with pytest.raises(ValueError, match="needs float32 or bfloat16 weights"):
        headroom.linear_cross_entropy(*half[:2], target, accumulate_into_grad=True)
    frozen = headroom.linear_cross_entropy(x, w.detach(), target, accumulate_into_grad=True)
    frozen.backward()  # the gradient of hidden alone, as without the option
    want = torch.autograd.grad(headroom.linear_cross_entropy(x, w.detach(), target), x)
    torch.testing.assert_close(x.grad, *want)


def test_gradients_are_added_to_grad_with_hooks(device):
    """Of leaves whose .grad is there: hooks of hidden run, those of what is added into .grad do
    not."""
    leaves, target, _ = sample(device=device)
    x, w, _ = leaves
    wanted = torch.autograd.grad(headroom.linear_cross_entropy(x, w, target), (x, w))
    for into_grad in (False, True):
        called = []
        leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
        for name, leaf in zip("xw", leaves):
            leaf.grad = torch.ones_like(leaf)
            leaf.register_hook(lambda grad, name=name, to=called: to.append(name))
        loss = headroom.linear_cross_entropy(*leaves, target, accumulate_into_grad=into_grad)
        loss.backward()
        assert sorted(called) == (["x"] if into_grad else ["w", "x"])
        for leaf, grad in zip(leaves, wanted):
            torch.testing.assert_close(leaf.grad, 1 + grad)


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_second_derivative_with_respect_to_any_input_raises(reduction, device):
    leaves, target, _ = sample(device=device)
    x, w, b = leaves
    loss = headroom.linear_cross_entropy(x, w, target, b, reduction=reduction).sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    for leaf in leaves:
        for grad in grads:
            with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
                torch.autograd.grad(grad.sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("way", ("reentrant", "without reentry", "saved on the CPU"))
def test_gradients_into_grad_where_saved_tensors_are_replaced(way, device):
    """The leaf that is unpacked is then not the one whose .grad the optimizer reads."""
    leaves, target, _ = sample(device=device)
    x, w, b = leaves

    def loss(x):
        return headroom.linear_cross_entropy(x, w, target, b, accumulate_into_grad=True)

    wanted = torch.autograd.grad(headroom.linear_cross_entropy(x, w, target, b), leaves)
    if way == "saved on the CPU":
        with torch.autograd.graph.save_on_cpu():
            value = loss(x)
    else:
        value = checkpoint(loss, x, use_reentrant=way == "reentrant")
    value.backward()
    for leaf, grad in zip(leaves, wanted):
        torch.testing.assert_close(leaf.grad, grad)


def test_lengths_compile_once_and_export(device):
    leaves, target, _ = sample(device=device)
    x, w, b = leaves
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    def loss(x, w, b, target):
        return headroom.linear_cross_entropy(x, w, target, b, shift=True, z_loss=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for count in (ROWS, 20, 5):
        inputs = x[:count].detach().clone().requires_grad_(), w, b
        got, wanted = (f(*inputs, target[:count].clone()) for f in (compiled, loss))
        assert torch.equal(got, wanted)
        grads = (torch.autograd.grad(value, inputs) for value in (got, wanted))
        assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert len(compiles) == 1
    module = headroom.nn.LinearCrossEntropyLoss(FEATURES, CLASSES, device=device)
    count = torch.export.Dim("count", min=2)
    sizes = {"input": {0: count}, "target": {0: count}}
    program = torch.export.export(module, (x.detach(), target), dynamic_shapes=sizes)
    for rows in (ROWS, 7):
        inputs = x[:rows].detach(), target[:rows]
        assert torch.equal(program.module()(*inputs), module(*inputs))


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_tensors_without_data(reduction):
    leaves, target, _ = sample()
    x, w, b = (t.detach().to("meta").requires_grad_() for t in leaves)
    loss = headroom.linear_cross_entropy(x, w, target.to("meta"), b, reduction=reduction)
    assert loss.is_meta and loss.shape == (() if reduction == "mean" else target.shape)
    for leaf, grad in zip((x, w, b), torch.autograd.grad(loss.sum(), (x, w, b))):
        assert grad.is_meta and grad.shape == leaf.shape and grad.dtype == leaf.dtype
    with pytest.raises(RuntimeError, match="on meta"):
        headroom.linear_cross_entropy(leaves[0], w, target)


def test_opcheck(device):
    leaves, target, (cw, tw) = sample(device=device)
    names = ("hidden", "weight", "bias", "target", "class_weight", "token_weight")
    layer = dict(zip(names, (*leaves, target, cw, tw)), denominator=None)
    options = ops.Options(label_smoothing=0.1)
    own, described = ops.of_weight(leaves[1])
    numbers = options.numbers(leaves[0]) | described

    def check(name, **given):
        op = getattr(torch.ops.headroom, name).default
        opcheck(op, [given[argument.name] for argument in op._schema.arguments])

    for reduction, results, wanted in ((1, 1023, 7), (0, 3, 0), (2, 3, 5), (0, 35, 0)):
        how = {"reduction": reduction, "results": results, "wanted": wanted}
        check("linear_cross_entropy", **own | layer, **numbers, **how)
    plain = {name: None if t is None else t.detach() for name, t in layer.items()}
    results = ("lse", "lse_low", "entropy")
    found = ops.call(options, results=results, **plain)
    factors, of_rows = found[1], dict(zip(ops.RESULTS, found[3:]))
    lse, low, entropy = (of_rows[name] for name in results)
    given = own | plain | numbers | {"factors": factors, "lse": lse, "lse_low": low}
    ones = torch.ones(ROWS, device=device)
    for wanted, of_entropy in ((7, None), (2, None), (7, ones)):
        given |= {"dloss": ones, "wanted": wanted, "entropy": entropy, "dentropy": of_entropy}
        check("linear_cross_entropy_backward", **given)
    given |= {"dloss": torch.ones((), device=device), "want_hidden": True}
    into = {"weight_grad": torch.ones_like(plain["weight"]), "bias_grad": None}
    check("linear_cross_entropy_backward_", **given, **into)
    sizes = {"rows": 5, "features": 8, "classes": 9, "dtype": 0, "adds": False, "capability": 90}
    check("linear_cross_entropy_workspace", **given | sizes)
