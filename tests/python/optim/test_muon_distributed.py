"""Muon on several ranks: whole matrices are made orthogonal, and the result is that of one rank."""

import pytest
import torch
import torch.distributed as dist
from headroom.optim import Muon, Muon8bit
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.mesh import mesh, whole
from helpers.ranks import Ranks

pytestmark = pytest.mark.gloo
CLOSE = {"rtol": 2**-6, "atol": 1e-3}


class Model(nn.ModuleDict):
    def forward(self):
        raise NotImplementedError  # fully_shard() wants one; gradients are set


def make():
    """Rows that do not divide by the ranks, tall and wide, packed and of experts."""
    torch.manual_seed(3)
    model = Model(
        {
            "tall": nn.Linear(16, 67),
            "wide": nn.Linear(67, 16),
            "more": nn.Linear(16, 67, bias=False),
            "gate_up": nn.Linear(64, 30, bias=False),
            "qkv": nn.Linear(64, 42, bias=False),
        }
    )
    model.register_parameter("experts", nn.Parameter(torch.randn(4, 8, 16)))
    return model


def grads(step, first=1):
    """So many times as large in the first rows, of which the last rank has none."""
    random = torch.Generator().manual_seed(step)
    given = [torch.randn(param.shape, generator=random) for param in make().parameters()]
    for grad in given:
        grad[: len(grad) // 4] *= first
    return given


def optimizer_of(cls, model, **options):
    options |= {"min_8bit_size": 100, "block_size": 64} if cls is Muon8bit else {}
    return cls(model, lr=0.05, split={"qkv": (20, 11, 11)}, workspace=50_000, **options)


def train(optimizer, model, steps=3, spread=lambda grad, param: grad, first=1):
    for step in range(steps):
        for param, grad in zip(model.parameters(), grads(step, first)):
            param.grad = spread(grad, param)
        optimizer.step(max_grad_norm=10.0)


def assert_close(params, expected):
    for param, want in zip(params, expected):
        torch.testing.assert_close(param, want, **CLOSE)


def fsdp(rank, cls):
    single, model = make(), make()
    train(optimizer_of(cls, single), single)
    fully_shard(model, mesh=mesh())
    before = [param.full_tensor().clone() for param in model.parameters()]
    optimizer = optimizer_of(cls, model)
    train(
        optimizer,
        model,
        spread=lambda grad, p: distribute_tensor(grad, p.device_mesh, p.placements),
    )
    params = whole(model.parameters())
    assert_close(params, single.parameters())
    assert all(not torch.equal(param, first) for param, first in zip(params, before))


@pytest.mark.parametrize("cls", [Muon, Muon8bit])
def test_fsdp2_gives_the_weights_of_one_rank(ranks, cls):
    ranks(fsdp, cls)


def ddp(rank, cls):
    """Each rank makes its share of the matrices orthogonal."""
    single, model = make(), make()
    train(optimizer_of(cls, single), single)
    train(optimizer_of(cls, model, process_group=dist.group.WORLD), model)
    assert_close(model.parameters(), single.parameters())
    for param in model.parameters():
        copies = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, param.detach())
        assert all(torch.equal(copy, param) for copy in copies)


@pytest.mark.parametrize("cls", [Muon, Muon8bit])
def test_ddp_shares_the_matrices(ranks, cls):
    ranks(ddp, cls)


def by_columns(rank):
    """Placements other than rows: every rank gathers the matrix."""
    for placement, shape in ((Shard(1), (12, 32)), (Shard(1), (4, 8, 16)), (Shard(2), (2, 8, 16))):
        random = torch.Generator().manual_seed(0)
        value, grad = (torch.randn(shape, generator=random) for _ in range(2))
        single = nn.Parameter(value.clone())
        sharded = nn.Parameter(distribute_tensor(value, mesh(), [placement]))
        single.grad = grad
        sharded.grad = distribute_tensor(grad, sharded.device_mesh, [placement])
        for param in (single, sharded):
            Muon([param], lr=0.05).step()
        torch.testing.assert_close(sharded.full_tensor(), single, **CLOSE)


def test_matrices_that_are_sharded_otherwise(ranks):
    ranks(by_columns)


def normuon(rank):
    """Means of rows are of the rank that has them, norms of all ranks; of parts, too."""
    single, model = make(), make()
    fully_shard(model, mesh=mesh())
    first, second = (optimizer_of(Muon, each, normuon=0.6) for each in (single, model))
    train(first, single, first=10)
    spread = lambda grad, p: distribute_tensor(grad, p.device_mesh, p.placements)  # noqa: E731
    train(second, model, spread=spread, first=10)
    plain = make()
    train(optimizer_of(Muon, plain), plain, first=10)
    assert not torch.allclose(plain["tall"].weight, single["tall"].weight, **CLOSE)
    assert_close(whole(model.parameters()), single.parameters())
    for param, other in zip(model.parameters(), single.parameters()):
        if "row_var" in second.state[param]:
            own, want = second.state[param]["row_var"], first.state[other]["row_var"]
            torch.testing.assert_close(own.full_tensor(), want, rtol=0.05, atol=0)
    matrices = second.param_groups[0]["params"]
    before = [second.state[param]["row_var"].to_local().clone() for param in matrices]
    for param in model.parameters():
        param.grad = spread(torch.full(param.shape, float("inf")), param)
    second.step(max_grad_norm=1.0)  # nothing changes
    for param, want in zip(matrices, before):
        assert torch.equal(second.state[param]["row_var"].to_local(), want)
    assert_close(whole(model.parameters()), single.parameters())


def test_normuon_of_sharded_rows(ranks):
    ranks(normuon)


def refusals(rank):
    param = nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh(), [Shard(0)]))
    param.grad = distribute_tensor(torch.randn(8, 16), param.device_mesh, [Shard(0)])
    before = param.to_local().clone()
    by_columns = nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh(), [Shard(1)]))
    by_columns.grad = distribute_tensor(torch.randn(8, 16), by_columns.device_mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="normuon normalizes whole rows, and these matrices are"):
        Muon([by_columns], normuon=0.9).step()
    uneven = nn.Parameter(distribute_tensor(torch.randn(7, 16), mesh(), [Shard(0)]))
    uneven.grad = distribute_tensor(torch.randn(7, 16), uneven.device_mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="7 of shape .* does not divide by 2 ranks"):
        Muon([uneven], offload="state").step()
    Muon([param], offload="state").step()
    assert not torch.equal(param.to_local(), before)


def test_what_shards_do_not_have(ranks):
    ranks(refusals)


@pytest.fixture(scope="module")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_four_ranks(four_ranks):
    four_ranks(fsdp, Muon8bit)
    four_ranks(ddp, Muon)
    four_ranks(normuon)
