"""headroom.grad_norm against a float64 norm of all gradients as one vector."""

import math

import headroom
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from helpers.ranks import WORLD_SIZE

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def parameters(dtypes=FLOATS):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(n, 3, dtype=dtypes[n % len(dtypes)])) for n in (2, 5)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def norm64(grads, p):
    return torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]), p).item()


@pytest.mark.parametrize("p", [2.0, 1.0, 3.5, math.inf, "inf"])
def test_parameters_and_gradients(p):
    params = parameters()
    grads = [param.grad for param in params]
    want = pytest.approx(norm64(grads, float(p)), rel=1e-6)
    kept = [grad.clone() for grad in grads]
    without = torch.nn.Parameter(torch.ones(3))
    for given in (params, grads, (g for g in params), [*params, without], [*grads, grads[0]]):
        norm = headroom.grad_norm(given, p)
        assert norm == want and norm.shape == () and norm.dtype == torch.float32
    assert all(torch.equal(grad, old) for grad, old in zip(grads, kept))


def test_one_tensor_and_none():
    param = parameters()[0]
    assert (
        headroom.grad_norm(param) == headroom.grad_norm(param.grad) == headroom.grad_norm([param])
    )
    for none in ([], [torch.nn.Parameter(torch.ones(3))], iter(())):
        assert headroom.grad_norm(none) == 0


def test_leaves_that_require_grad_are_parameters():
    leaf = torch.ones(4, requires_grad=True)
    (leaf.grad,) = torch.autograd.grad((leaf * leaf).sum(), leaf, create_graph=True)
    assert leaf.grad.requires_grad  # and is no leaf
    assert headroom.grad_norm([leaf]) == headroom.grad_norm([leaf.grad]) == 4
    assert not headroom.grad_norm([leaf]).requires_grad


@pytest.mark.parametrize("p", [0.0, -1.0, 2.0])
def test_what_is_left_to_torch(p):
    grads = [param.grad for param in parameters([torch.float64, torch.float32])]
    assert headroom.grad_norm(grads, p) == torch.nn.utils.get_total_norm(grads, p)


def test_the_default_device_has_no_say():
    grads = [p.grad for p in parameters()]
    with torch.device("meta"):
        norm = headroom.grad_norm(grads)
    assert norm.item() == headroom.grad_norm(grads).item() > 0


def test_a_norm_that_is_not_finite():
    params = parameters()
    params[0].grad[1, 1] = math.nan
    assert headroom.grad_norm(params).isnan()


@pytest.mark.parametrize(
    "given, words",
    [
        (None, "got NoneType"),
        (3, "got int"),
        ("weight", "got str"),
        (torch.nn.Linear(1, 1), "got a module; give its parameters()"),
        ([torch.ones(1), None], "item 1 is a NoneType"),
        ([("weight", torch.ones(1))], "item 0 is a tuple; named_parameters() gives pairs"),
    ],
)
def test_wrong_types(given, words):
    with pytest.raises(TypeError, match="wants parameters or gradients") as caught:
        headroom.grad_norm(given)
    assert words in str(caught.value)


def sharded(rank):
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    values = torch.randn(3, 5, 3)
    plain = torch.ones(4)
    for p in (2.0, math.inf):
        for placement in (Shard(0), Shard(1), Replicate()):
            grads = [*(distribute_tensor(value, mesh, [placement]) for value in values), plain]
            norm = headroom.grad_norm(grads, p)
            assert norm.item() == pytest.approx(norm64([*values, plain], p), rel=1e-6)
            assert type(norm) is torch.Tensor
        partial = DTensor.from_local(values[0] / WORLD_SIZE, mesh, [Partial()])
        norm = headroom.grad_norm([partial], p)
        assert norm.item() == pytest.approx(norm64(values[:1], p), rel=1e-6)
    wide = distribute_tensor(values.double(), mesh, [Shard(0)])
    norm = headroom.grad_norm([wide])
    assert type(norm) is torch.Tensor and norm.item() == pytest.approx(norm64([values], 2))


@pytest.mark.gloo
def test_shards_of_all_ranks_count(ranks):
    ranks(sharded)
