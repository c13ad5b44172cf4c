"""Accumulation over two processes: DDP, FSDP and FSDP2, with unequal weights.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import contextlib
import gc

import headroom
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.mesh import mesh, whole
from helpers.ranks import WORLD_SIZE
from helpers.sharded_grads import ADAMW, CLOSE, backward, batch, grads, make_model

pytestmark = pytest.mark.gloo


def accumulate_ddp(rank, compensated, as_view):
    """Micro-batches of unequal size on both ranks, against one process with all of them."""
    sizes = [[3, 5, 2], [7, 1, 4]]
    net, single = make_model(), make_model()
    model = DistributedDataParallel(net, gradient_as_bucket_view=as_view)
    accumulator = headroom.GradAccumulator(model, compensated=compensated)
    calls = []
    original = dist.all_reduce

    for window in range(2):
        single.zero_grad()
        seeds = [[100 * window + 10 * r + k for k in range(3)] for r in range(WORLD_SIZE)]
        for size, seed in zip(sizes[rank], seeds[rank]):
            x, y = batch(seed, size)
            with accumulator.micro_batch(weight=size):
                mse_loss(model(x), y).backward()
        try:
            dist.all_reduce = lambda *a, **k: (calls.append(1), original(*a, **k))[1]
            accumulator.finish()
        finally:
            dist.all_reduce = original
        parts = [batch(s, n) for r in range(WORLD_SIZE) for n, s in zip(sizes[r], seeds[r])]
        x, y = (torch.cat(column) for column in zip(*parts))
        mse_loss(single(x), y).backward()
        for a, b in zip(net.parameters(), single.parameters()):
            torch.testing.assert_close(a.grad, b.grad, **CLOSE)
    assert len(calls) == 4  # of each window: the weights, and all gradients together


@pytest.mark.parametrize("as_view", [False, True], ids=["", "gradient_as_bucket_view"])
@pytest.mark.parametrize("compensated", [False, True], ids=["plain", "compensated"])
def test_ddp_is_one_big_batch(ranks, compensated, as_view):
    ranks(accumulate_ddp, compensated, as_view)


def accumulate_ddp_bf16(rank):
    """Against the float64 mean of what every micro-batch gives in bfloat16."""
    model, single = DistributedDataParallel(make_model().bfloat16()), make_model().bfloat16()
    accumulator = headroom.GradAccumulator(model)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in single.parameters()]
    for seed in range(2 * WORLD_SIZE):
        x, y = (t.bfloat16() for t in batch(seed))
        if seed % WORLD_SIZE == rank:
            with accumulator.micro_batch():
                mse_loss(model(x), y).backward()
        single.zero_grad()
        mse_loss(single(x), y).backward()
        for total, p in zip(exact, single.parameters()):
            total += p.grad.double() / (2 * WORLD_SIZE)
    accumulator.finish()
    for grad, want in zip(grads(model), exact):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), want, **CLOSE)


def test_ddp_in_bf16(ranks):
    ranks(accumulate_ddp_bf16)


class Branches(torch.nn.Module):
    """Rank 0 uses the first, rank 1 the second, nobody the third."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](x)


def unused_parameters(rank):
    torch.manual_seed(1)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    accumulator = headroom.GradAccumulator(model)
    for weight in (1.0, 3.0):
        with accumulator.micro_batch(weight):
            model(torch.ones(2, 3), rank).mean().backward()
    accumulator.finish()
    first, second, third = (branch.weight.grad for branch in model.module.branches)
    assert first.eq(0.5).all() and second.eq(0.5).all() and third is None


def test_ddp_with_unused_parameters(ranks):
    ranks(unused_parameters)


def accumulate_fsdp(rank):
    """FSDP2 reduces every micro-batch by itself; the sums are those of the shards, in float32."""
    sharded, single = fully_shard(make_model(), mesh=mesh()), make_model()
    for model in (sharded, single):
        group = "local" if model is single else None
        accumulator = headroom.GradAccumulator(model, process_group=group)
        for seed, weight in enumerate([2.0, 5.0, 1.0]):
            with accumulator.micro_batch(weight):
                backward(model, seed)
        accumulator.finish()
    optimizers = [ADAMW(m.parameters(), lr=0.01) for m in (sharded, single)]
    for a, b in zip(whole(grads(sharded)), grads(single)):
        torch.testing.assert_close(a, b, **CLOSE)
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(whole(sharded.parameters()), single.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_accumulation_under_fsdp(ranks):
    ranks(accumulate_fsdp)


def accumulate_fsdp_bf16(rank):
    """Parameters in bfloat16: the sharded float32 mean is taken by the optimizer."""
    model = fully_shard(make_model().bfloat16(), mesh=mesh())
    accumulator = headroom.GradAccumulator(model)
    for seed in range(3):
        x, y = (t.bfloat16() for t in batch(seed))
        with accumulator.micro_batch():
            mse_loss(model(x), y).backward()
    accumulator.finish()
    assert all(g.dtype == torch.float32 and isinstance(g, DTensor) for g in grads(model))
    before = whole(model.parameters())
    ADAMW(model.parameters(), lr=0.1, state_dtype=torch.float32, max_grad_norm=1.0).step()
    assert not any(torch.equal(a, b) for a, b in zip(whole(model.parameters()), before))


def test_accumulation_under_fsdp_in_bf16(ranks):
    ranks(accumulate_fsdp_bf16)


# Tokens of the micro-batches of each rank, in two windows.
TOKENS = [[[3, 50, 8], [9, 1, 2]], [[40, 2, 6], [5, 30, 1]]]


def mean_over_all(params, micro_batches):
    """The float64 mean of (weight, gradients of a micro-batch), of all ranks."""
    total = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    weight = sum(weight for weight, _ in micro_batches)
    for part, gradients in micro_batches:
        for sum_, grad in zip(total, gradients):
            sum_ += part / weight * grad
    return total


def float64_grads(tokens, seed, params):
    single = make_model().double()
    for p, q in zip(single.parameters(), params):
        p.data.copy_(q)
    x, y = batch(seed, tokens)
    mse_loss(single(x.double()), y.double()).backward()
    return [p.grad for p in single.parameters()]


def shard_each(model, **options):
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def hybrid():
    return init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("replicate", "shard"))


WRAPS = {
    "ddp": DistributedDataParallel,
    "made before ddp": DistributedDataParallel,
    "group": lambda model: model,
    "fsdp2": lambda model: fully_shard(model, mesh=mesh()),
    "fsdp2, layers": lambda model: shard_each(model, mesh=mesh()),
    "fsdp2, hybrid": lambda model: shard_each(model, mesh=hybrid()),
    "fsdp2, on the host": lambda model: shard_each(model, mesh=mesh()),
    "ddp, on the host": DistributedDataParallel,
    "fsdp2, released, on the host": lambda model: shard_each(model, mesh=mesh()),
    "fsdp2, released": lambda model: shard_each(model, mesh=mesh()),
}


def unequal_tokens(rank, wrap):
    model = make_model()
    group = dist.group.WORLD if wrap == "group" else None
    if wrap == "made before ddp":
        accumulator = headroom.GradAccumulator(model)
    model = WRAPS[wrap](model)
    if wrap != "made before ddp":
        accumulator = headroom.GradAccumulator(
            model, process_group=group, host="on the host" in wrap
        )
    optimizer = ADAMW(model.parameters(), lr=0.01)
    if "released" in wrap:
        headroom.release_gradients(model, optimizer, accumulator=accumulator)
    for window, tokens in enumerate(TOKENS):
        params = whole(model.parameters())
        want = []
        for r in range(WORLD_SIZE):
            for k, count in enumerate(tokens[r]):
                seed = 100 * window + 10 * r + k
                want.append((count, float64_grads(count, seed, params)))
                if r == rank:
                    x, y = batch(seed, count)
                    with accumulator.micro_batch(weight=count):
                        mse_loss(model(x), y).backward()
        accumulator.finish()
        for grad, exact in zip(whole(grads(model)), mean_over_all(params, want)):
            torch.testing.assert_close(grad.double(), exact, rtol=2**-20, atol=2**-22)
        optimizer.step()
        optimizer.zero_grad()
    if "fsdp2" not in wrap:
        check = torch.stack([p.detach().double().sum() for p in model.parameters()])
        same = [torch.empty_like(check) for _ in range(WORLD_SIZE)]
        dist.all_gather(same, check)
        assert_same_bits(same[:1], same[1:])


@pytest.mark.parametrize("wrap", WRAPS)
def test_unequal_token_counts(ranks, wrap):
    """The mean over the tokens of all ranks, against float64 in one process."""
    ranks(unequal_tokens, wrap)


def no_sync(rank, wrap):
    """The user's own no_sync() for all micro-batches but the last, which alone is reduced."""
    model, tokens = WRAPS[wrap](make_model()), TOKENS[0]
    accumulator = headroom.GradAccumulator(model)
    params, want = whole(model.parameters()), []
    for r in range(WORLD_SIZE):
        for k, count in enumerate(tokens[r]):
            want.append((count, float64_grads(count, 10 * r + k, params)))
    for k, count in enumerate(tokens[rank]):
        last, (x, y) = k == 2, batch(10 * rank + k, count)
        with contextlib.ExitStack() as stack:
            if wrap == "ddp" and not last:
                stack.enter_context(model.no_sync())
            elif wrap != "ddp":
                model.set_requires_gradient_sync(last)
            stack.enter_context(accumulator.micro_batch(weight=count))
            mse_loss(model(x), y).backward()
    accumulator.finish()
    for grad, exact in zip(whole(grads(model)), mean_over_all(params, want)):
        torch.testing.assert_close(grad.double(), exact, rtol=2**-20, atol=2**-22)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp2, layers"])
def test_unequal_token_counts_and_no_sync(ranks, wrap):
    ranks(no_sync, wrap)


def averaged_before(rank, wrap, how, equal):
    """Gradients that are reduced before the weight is known: right if the weights are equal, an
    error if they are not."""
    model = FullyShardedDataParallel(make_model()) if wrap == "fsdp1" else WRAPS[wrap](make_model())
    optimizer = ADAMW(model.parameters())
    accumulator = headroom.GradAccumulator(optimizer if how == "optimizer" else model)
    single, seeds = make_model(), [[1, 2], [3, 4]]
    for k, seed in enumerate(seeds[rank]):
        weight = 2 + k if equal else 1 + rank + k
        if how == "add":
            backward(model, seed)
            accumulator.add(weight)
        else:
            with accumulator.micro_batch(weight):
                backward(model, seed)
    if not equal:
        with pytest.raises(RuntimeError, match="the weights of micro-batches differ between ranks"):
            accumulator.finish()
        assert all(p.grad is None for p in model.parameters())
        return
    accumulator.finish()
    want = []
    for column in seeds:
        for k, seed in enumerate(column):
            want.append((2 + k, float64_grads(8, seed, single.parameters())))
    if wrap == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            got = [p.grad.clone() for p in model.parameters()]
    else:
        got = whole(grads(model))
    for grad, exact in zip(got, mean_over_all(single.parameters(), want)):
        torch.testing.assert_close(grad.double().view_as(exact), exact, rtol=2**-20, atol=2**-22)


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    "wrap, how", [("ddp", "add"), ("fsdp2", "add"), ("fsdp2", "optimizer")], ids=str
)
def test_gradients_averaged_before_they_have_a_weight(ranks, wrap, how, equal):
    ranks(averaged_before, wrap, how, equal)


def nothing_known(rank, how):
    """DDP that the accumulator cannot see, and no DDP at all."""
    model = make_model()
    ddp = model if how == "no ddp" else DistributedDataParallel(model)
    source = {"optimizer": ADAMW(model.parameters()), "list": list(model.parameters())}
    accumulator = headroom.GradAccumulator(source.get(how, model))
    words = "2 ranks train, and nothing says how their gradients are reduced"
    with pytest.raises(RuntimeError, match=words):
        if how == "add":
            backward(ddp, rank)
            accumulator.add()
        else:
            with accumulator.micro_batch():
                assert how == "no ddp"  # else it is known before the work is done
                backward(ddp, rank)
    if how != "add":
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match="without a micro-batch"):
        accumulator.finish()


@pytest.mark.parametrize("how", ["optimizer", "list", "add", "no ddp"])
def test_an_accumulator_that_cannot_know(ranks, how):
    ranks(nothing_known, how)


def contradictions(rank):
    model = DistributedDataParallel(make_model())
    with pytest.raises(ValueError, match="'local' contradicts DistributedDataParallel"):
        headroom.GradAccumulator(model, process_group="local")
    for group in ("local", dist.group.WORLD):
        with pytest.raises(ValueError, match="contradicts FSDP"):
            headroom.GradAccumulator(fully_shard(make_model(), mesh=mesh()), process_group=group)
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup"):
        headroom.GradAccumulator(make_model(), process_group="world")


def test_process_groups_that_do_not_fit(ranks):
    ranks(contradictions)


def equal_weights_change_no_bits(rank):
    """Where all ranks have the same weight, FSDP2's gradients are as they were."""
    nets = [fully_shard(make_model(), mesh=mesh()) for _ in range(2)]
    accumulator = headroom.GradAccumulator(nets[0])
    with accumulator.micro_batch(weight=4):  # a power of two, which rounds nothing
        backward(nets[0], rank)
    accumulator.finish()
    backward(nets[1], rank)
    assert_same_bits(*([g.to_local() for g in grads(net)] for net in nets))


class Renamed(torch.nn.Module):
    """A model whose work another method than forward() does."""

    def __init__(self):
        super().__init__()
        self.net = make_model()

    def loss(self, x, y):
        return mse_loss(self.net(x), y)


def weights_that_come_too_late(rank):
    """Hooks on the model's forward() put in the weight; they do not run where it is not called."""
    model = fully_shard(Renamed(), mesh=mesh())
    register_fsdp_forward_method(model, "loss")
    accumulator = headroom.GradAccumulator(model)
    single = make_model()
    backward(single, 1)
    for weights in ([3, 3], [2, 3]):
        if weights[0] == weights[1]:
            with accumulator.micro_batch(weights[rank]):
                model.loss(*batch(1)).backward()
            accumulator.finish()
            for a, b in zip(whole(grads(model)), grads(single)):
                torch.testing.assert_close(a, b, **CLOSE)
        elif rank == 0:  # the other has the largest weight, and nothing to multiply by
            with pytest.raises(RuntimeError, match="averaged a gradient before it had this rank's"):
                with accumulator.micro_batch(weights[rank]):
                    model.loss(*batch(1)).backward()
        else:
            with accumulator.micro_batch(weights[rank]):
                model.loss(*batch(1)).backward()


def test_weights_that_fsdp2_gets_too_late(ranks):
    ranks(weights_that_come_too_late)


def gradients_outside(rank):
    """A micro-batch's weight is in no gradient after it, and nothing stays of an accumulator."""
    net, single = fully_shard(make_model(), mesh=mesh()), make_model()
    before = [len(module._forward_pre_hooks) for module in net.modules()]
    accumulator = headroom.GradAccumulator(net)
    with accumulator.micro_batch(1 + rank):
        backward(net, 2)
    accumulator.finish()
    net.zero_grad()
    backward(net, 3)
    backward(single, 3)
    for a, b in zip(whole(grads(net)), grads(single)):
        torch.testing.assert_close(a, b, **CLOSE)
    del accumulator
    gc.collect()
    assert [len(module._forward_pre_hooks) for module in net.modules()] == before


def test_gradients_outside_of_micro_batches(ranks):
    ranks(gradients_outside)


def test_equal_weights_under_fsdp2_have_the_usual_bits(ranks):
    ranks(equal_weights_change_no_bits)


def unfrozen_and_without_labels(rank, wrap):
    """One more layer from the second window on, and a micro-batch of rank 1 that has no labels: a
    loss that is a mean over nothing, as is its gradient."""
    net, single = make_model(), make_model()
    for model in (net, single):
        list(model.parameters())[0].requires_grad_(False)
    model = DistributedDataParallel(net) if wrap == "ddp" else fully_shard(net, mesh=mesh())
    accumulator = headroom.GradAccumulator(model)
    for window in range(3):
        if window == 1 and wrap == "ddp":  # FSDP2 itself does not see it once it has run
            for each in (net, single):
                each.requires_grad_(True)
        single.zero_grad()
        sizes = [[0, 3], [0, 2]] if window == 0 else [[3, 2], [5, 0]]
        seeds = [[100 * window + 10 * r + k for k in range(2)] for r in range(WORLD_SIZE)]
        for size, seed in zip(sizes[rank], seeds[rank]):
            x, y = batch(seed, max(size, 1))
            with accumulator.micro_batch(weight=size):
                (mse_loss(model(x), y) * (1 if size else float("nan"))).backward()
        accumulator.finish()
        parts = [batch(s, n) for r in range(WORLD_SIZE) for n, s in zip(sizes[r], seeds[r]) if n]
        x, y = (torch.cat(column) for column in zip(*parts))
        mse_loss(single(x), y).backward()
        for a, b in zip(net.parameters(), single.parameters()):
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                torch.testing.assert_close(*whole([a.grad]), b.grad, **CLOSE)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_layers_that_are_unfrozen_and_micro_batches_without_labels(ranks, wrap):
    ranks(unfrozen_and_without_labels, wrap)
