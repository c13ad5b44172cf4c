"""Clipping and scaling over two processes: FSDP2, DTensors of any placement.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import math

import headroom
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss

from helpers.bits import assert_same_bits, bits
from helpers.mesh import mesh, whole
from helpers.ranks import WORLD_SIZE
from helpers.sharded_grads import ADAMW, CLOSE, backward, batch, grads, make_model

pytestmark = pytest.mark.gloo


def shards_and_whole(factor=1.0):
    """A sharded and a whole model with the gradients of the same batch on every rank."""
    sharded, single = fully_shard(make_model(), mesh=mesh()), make_model()
    for model in (sharded, single):
        backward(model, 0, factor)
    return sharded, single


# ---- Clipping ------------------------------------------------------------------------------------


def clip_fsdp(rank, p):
    sharded, single = shards_and_whole(factor=100.0)
    norm = headroom.clip_grad_norm_(sharded.parameters(), 0.5, p)
    want = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5, p)
    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm, want, **CLOSE)
    for a, b in zip(whole(grads(sharded)), grads(single)):
        torch.testing.assert_close(a, b, **CLOSE)
    same = [torch.empty_like(norm) for _ in range(WORLD_SIZE)]
    dist.all_gather(same, norm)
    assert_same_bits(same[:1], same[1:])


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, math.inf])
def test_the_norm_of_fsdp_is_that_of_the_whole_model(ranks, p):
    ranks(clip_fsdp, p)


def clip_nonfinite(rank, p, value):
    """The bad value is on rank 1 only; the norm is not finite on both."""
    sharded, _ = shards_and_whole()
    if rank == 1:
        sharded[0].weight.grad.to_local()[0, 0] = value
    kept = [bits(g.to_local()).clone() for g in grads(sharded)]
    with pytest.raises(RuntimeError, match="is non-finite"):
        headroom.clip_grad_norm_(sharded.parameters(), 1.0, p, error_if_nonfinite=True)
    assert all(torch.equal(bits(g.to_local()), k) for g, k in zip(grads(sharded), kept))
    norm = headroom.clip_grad_norm_(sharded.parameters(), 1.0, p)
    assert norm.isnan() if math.isnan(value) else norm == math.inf


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_bad_value_on_one_rank_is_seen_by_all(ranks, p, value):
    ranks(clip_nonfinite, p, value)


PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
}


def clip_dtensors(rank):
    """DTensors of every placement and a plain tensor in one call."""
    where, parts, full = mesh(), [], []
    for seed, placements in enumerate(PLACEMENTS.values()):
        value = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        param = torch.nn.Parameter(distribute_tensor(value, where, placements))
        param.grad = distribute_tensor(3 * value, where, placements)
        parts.append(param)
        full.append(3 * value)
    # Whole only when the parts of both ranks are added up.
    summand = torch.full((4,), 1.0 + rank)
    grad = DTensor.from_local(summand, where, [Partial()])
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(4), where, [Replicate()]))
    partial.grad = grad
    parts.append(partial)
    full.append(torch.full((4,), 3.0))
    plain = torch.nn.Parameter(torch.ones(7))
    plain.grad = torch.arange(7.0)
    parts.append(plain)
    full.append(plain.grad.clone())
    exact = torch.cat([t.double().flatten() for t in full]).norm()
    norm = headroom.clip_grad_norm_(parts, 1.0)
    torch.testing.assert_close(norm.double(), exact, rtol=2**-22, atol=0)
    for part, value in zip(whole([p.grad for p in parts]), full):
        torch.testing.assert_close(part, value / exact.float(), **CLOSE)


def test_placements_side_by_side(ranks):
    ranks(clip_dtensors)


def clip_two_dimensions(rank):
    """A mesh of two dimensions, sharded over both."""
    where = init_device_mesh("cpu", (1, WORLD_SIZE))
    value = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    param = torch.nn.Parameter(distribute_tensor(value, where, [Shard(1), Shard(0)]))
    param.grad = distribute_tensor(value, where, [Shard(1), Shard(0)])
    norm = headroom.clip_grad_norm_(param, 1.0)
    torch.testing.assert_close(norm.double(), value.double().norm(), rtol=2**-22, atol=0)


def test_a_mesh_of_two_dimensions(ranks):
    ranks(clip_two_dimensions)


def step_clipped(rank, max_norm):
    sharded, single = fully_shard(make_model(), mesh=mesh()), make_model()
    optimizer = ADAMW(sharded.parameters(), lr=0.01, max_grad_norm=max_norm)
    reference = ADAMW(single.parameters(), lr=0.01, max_grad_norm=max_norm)
    for step in range(4):
        for model, opt in ((sharded, optimizer), (single, reference)):
            opt.zero_grad()
            backward(model, step)
            opt.step()
        torch.testing.assert_close(optimizer.grad_norm, reference.grad_norm, **CLOSE)
    for a, b in zip(whole(sharded.parameters()), single.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [0.1, 1e5])
def test_max_grad_norm_under_fsdp(ranks, max_norm):
    ranks(step_clipped, max_norm)


# ---- Scaling -------------------------------------------------------------------------------------


def skip_together(rank, kind, unscale, bad_rank):
    """A NaN in one shard: both ranks skip, the scale falls on both, and no byte moves."""
    model = fully_shard(make_model(), mesh=mesh())
    optimizer = {
        "ours": lambda: ADAMW(model.parameters(), lr=0.01),
        "clipping": lambda: ADAMW(model.parameters(), lr=0.01, max_grad_norm=1.0),
        "torch's": lambda: torch.optim.AdamW(model.parameters(), lr=0.01),
    }[kind]()
    scaler = headroom.amp.GradScaler("cpu", max_consecutive_skips=1)
    for step, bad in enumerate([False, True, False]):
        optimizer.zero_grad()
        x, y = batch(step)
        scaler.scale(mse_loss(model(x), y)).backward()
        if bad and rank == bad_rank:
            model[0].weight.grad.to_local()[0, 0] = math.nan
        before = [bits(p.to_local()).clone() for p in model.parameters()]
        if unscale:
            scaler.unscale_(optimizer)
        flag = scaler.step(optimizer)
        if kind != "torch's":
            assert flag == bad
        assert scaler.culprit() == ("parameter 0 of group 0" if bad and rank == bad_rank else None)
        scaler.update()
        now = [bits(p.to_local()) for p in model.parameters()]
        assert all(map(torch.equal, now, before)) == bad
    assert scaler.get_scale() == 2.0**15
    assert all(entry["step"].item() == 2 for entry in optimizer.state.values())


@pytest.mark.parametrize("bad_rank", range(WORLD_SIZE))
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("kind", ["ours", "clipping", "torch's"])
def test_all_ranks_skip_when_one_shard_overflows(ranks, kind, unscale, bad_rank):
    ranks(skip_together, kind, unscale, bad_rank)


def scaled_fsdp(rank):
    """The bits of an unscaled sharded run."""
    scaled, plain = (fully_shard(make_model(), mesh=mesh()) for _ in range(2))
    scaler = headroom.amp.GradScaler("cpu")
    optimizer, reference = (ADAMW(m.parameters(), lr=0.01) for m in (scaled, plain))
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        scaler.scale(mse_loss(scaled(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        backward(plain, step)
        reference.step()
    assert_same_bits(whole(scaled.parameters()), whole(plain.parameters()))


def test_scaling_under_fsdp_has_the_bits_of_no_scaling(ranks):
    ranks(scaled_fsdp)
