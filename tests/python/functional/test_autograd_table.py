"""Every op with a gradient through every way that torch has to one. The ops are the rows of
`helpers/differentiable_ops.py`, the ways are the columns, here."""

import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers.differentiable_ops import OPS
from helpers.mesh import mesh, whole
from helpers.ranks import WORLD_SIZE

WAYS = {}


def way(check):
    WAYS[check.__name__] = check
    return check


def loss_of(function, *inputs):
    """A number that depends on all results, on each in another way."""
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    return sum((k + 1) * (y.float() * y.float().cos()).sum() for k, y in enumerate(results))


def gradients(function, inputs):
    return torch.autograd.grad(loss_of(function, *inputs), inputs)


def assert_equal(got, wanted):
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"input {k}"


def first_of(results):
    return results[0] if isinstance(results, tuple) else results


@way
def the_reference_agrees(op, device):
    inputs = op.inputs(device=device)
    exact = gradients(op.reference, [t.detach().double().requires_grad_() for t in inputs])
    for got, wanted in zip(gradients(op.function, inputs), exact, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@way
def checkpoints(op, device):
    inputs = op.inputs(device=device)
    wanted = gradients(op.function, inputs)
    lean = functools.partial(checkpoint, op.function, use_reentrant=False)
    assert_equal(gradients(lean, inputs), wanted)
    loss_of(functools.partial(checkpoint, op.function, use_reentrant=True), *inputs).backward()
    assert_equal([t.grad for t in inputs], wanted)


@way
def saved_tensors_hooks_see_each_tensor_once(op, device):
    inputs = op.inputs(device=device)
    wanted = gradients(op.function, inputs)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    def unpack(place):
        unpacked.append(place)
        return packed[place]

    with saved_tensors_hooks(pack, unpack):
        results = op.function(*inputs)
    count = len(packed)
    assert count > 0
    assert_equal(gradients(lambda *_: results, inputs), wanted)
    assert sorted(unpacked) == [*range(count)]


@way
def no_grad_and_inference_mode(op, device):
    inputs = op.inputs(device=device)
    wanted = first_of(op.function(*inputs))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = first_of(op.function(*inputs))
        assert torch.equal(got, wanted) and wanted.requires_grad and not got.requires_grad
    with torch.inference_mode():
        inside = [t.detach().clone() for t in inputs]
        assert torch.equal(first_of(op.function(*inside)), wanted)


@way
def torch_func(op, device):
    inputs = op.inputs(device=device)
    wanted = gradients(op.function, inputs)
    plain, every = [t.detach() for t in inputs], tuple(range(len(inputs)))
    loss = functools.partial(loss_of, op.function)
    assert_equal(torch.func.grad(loss, every)(*plain), wanted)
    value, pull = torch.func.vjp(loss, *plain)
    assert_equal(pull(torch.ones_like(value)), wanted)  # after the transform has ended

    def inner(*inputs):  # another variable than the outer one
        return torch.func.grad(lambda scale: scale * loss(*inputs))(torch.ones_like(value))

    assert_equal(torch.func.grad(inner, every)(*plain), wanted)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(loss, tuple(plain), tuple(plain))
    with forward_ad.dual_level():  # which others have entered, for tensors of theirs
        assert torch.equal(loss(*plain), loss(*inputs))

    def twice():
        return torch.func.grad(lambda *given: torch.func.grad(loss)(*given).sum())(*plain)

    if op.twice:  # of its own products: torch's may add in another order
        torch.testing.assert_close(twice(), second_derivative(op.function, op, device)[0])
        return
    with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
        twice()


def second_derivative(function, op, device):
    """Of the sum of the first input's gradient, with respect to all."""
    inputs = op.inputs(device=device)
    loss = loss_of(function, *inputs)
    first = torch.autograd.grad(loss, inputs[0], create_graph=True)[0]
    return torch.autograd.grad(first.sum(), inputs, allow_unused=True)


@way
def a_second_derivative_is_right_or_raises(op, device):
    inputs = op.inputs(device=device)
    grads = torch.autograd.grad(loss_of(op.function, *inputs), inputs, create_graph=True)
    assert_equal(grads, gradients(op.function, inputs))
    if op.twice:
        got, wanted = (second_derivative(f, op, device) for f in (op.function, op.reference))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        return
    penalty = sum(grad.square().sum() for grad in grads)
    for leaf in inputs:  # one of them alone, too
        with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
            torch.autograd.grad(penalty, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
        penalty.backward()
    # Of a loss whose own gradient is a constant, which leads back to nothing.
    results = op.function(*inputs)
    total = sum(y.sum() for y in (results if isinstance(results, tuple) else (results,)))
    grads = torch.autograd.grad(total, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
        torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs[0])


@way
def a_saved_input_that_changed_raises(op, device):
    if not op.keeps_inputs:
        return
    inputs = op.inputs(device=device)
    saved = set()
    with saved_tensors_hooks(lambda t: saved.add(t.data_ptr()) or t, lambda t: t):
        op.function(*inputs)
    places = [k for k, tensor in enumerate(inputs) if tensor.data_ptr() in saved]
    assert places
    for k in places:
        loss = loss_of(op.function, *inputs)
        with torch.no_grad():
            inputs[k].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@way
def a_gradient_may_be_expanded_or_transposed(op, device):
    inputs = op.inputs(device=device)
    result = first_of(op.function(*inputs))
    needed = [t for t in inputs if t.requires_grad]

    def backward(grad):
        return torch.autograd.grad(result, needed, grad, retain_graph=True, allow_unused=True)

    one = torch.full((), 0.5, device=device)
    turned = torch.randn(result.shape[::-1], device=device).permute([*range(result.dim())][::-1])
    for grad in (one.expand(result.shape), turned):
        for got, wanted in zip(backward(grad), backward(grad.contiguous())):
            torch.testing.assert_close(got, wanted)  # products may add in another order


@way
def frozen_inputs_change_no_other_gradient(op, device):
    inputs = op.inputs(device=device)
    for k, wanted in enumerate(gradients(op.function, inputs)):
        given = [t.detach() for t in inputs]
        given[k].requires_grad_()
        (got,) = torch.autograd.grad(loss_of(op.function, *given), given[k])
        torch.testing.assert_close(got, wanted)


@way
def autocast(op, device):
    """Under AMP rows come out of a product in bfloat16, and other arguments are float32."""
    inputs = op.inputs(device=device)
    product = torch.eye(inputs[0].shape[-1], device=device)

    def block(rows, *others):
        return op.function(rows @ product, *others)

    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert (inputs[0] @ product).dtype == torch.bfloat16
        got = gradients(block, inputs)
    for grad, wanted in zip(got, gradients(op.reference, inputs), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - wanted).norm() < 0.03 * wanted.norm()


@way
def compiled(op, device):
    inputs = op.inputs(device=device)
    traced = torch.compile(op.function, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(traced, inputs), gradients(op.function, inputs))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("name", WAYS)
def test_gradients(name, op, device):
    WAYS[name](op, device)


# ---- Several processes -----------------------------------------------------------------------


class Holder(nn.Module):
    """An op whose other arguments are parameters."""

    def __init__(self, op):
        super().__init__()
        _, *others = op.inputs()
        self.op = op
        self.others = nn.ParameterList([t.detach().clone() for t in others])

    def forward(self, rows):
        return self.op.function(rows, *self.others)


def each_rank_takes_rows_of_its_own(rank):
    """The gradients of DDP and FSDP2, which are means over ranks, are those of one process."""
    for op in (op for op in OPS if len(op.shapes) > 1):
        batches = [op.inputs()[0].detach() * (k + 1) for k in range(WORLD_SIZE)]
        single = Holder(op)
        for batch in batches:
            (loss_of(single, batch) / WORLD_SIZE).backward()
        wanted = [p.grad for p in single.parameters()]
        sharded = fully_shard(Holder(op), mesh=mesh())
        for model in (DistributedDataParallel(Holder(op)), sharded):
            loss_of(model, batches[rank]).backward()
            for got, expected in zip(whole([p.grad for p in model.parameters()]), wanted):
                torch.testing.assert_close(got, expected, msg=f"{op.name}: {got} != {expected}")


@pytest.mark.slow
def test_ranks(ranks):
    ranks(each_rank_takes_rows_of_its_own)
