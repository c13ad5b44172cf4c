"""Optimizers in two processes: DDP, FSDP2, DTensors, ZeRO.

The functions without `test_` in their name run on both ranks (helpers/ranks.py). The optimizer
is element-wise, so a sharded step must give the bits of the same step on the whole tensors.
"""

import headroom
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.mesh import mesh, whole
from helpers.ranks import WORLD_SIZE
from helpers.sharded_adamw import ADAMW, OPTIONS, Model, assert_same_state, backward, sharded, train

pytestmark = pytest.mark.gloo
EITHER = pytest.mark.parametrize(  # the second with 8-bit moments for two of five parameters
    "cls, options",
    [(ADAMW, OPTIONS), (headroom.optim.AdamW8bit, OPTIONS | {"min_8bit_size": 5})],
    ids=["AdamW", "AdamW8bit"],
)


# ---- DDP -----------------------------------------------------------------------------------------


def ddp(rank, cls, options, as_view):
    """With states here, or on the host of each rank, in pieces."""
    model = DistributedDataParallel(Model(), gradient_as_bucket_view=as_view)
    optimizer = cls(model.parameters(), **options)
    if as_view:
        headroom.optim.offload(optimizer, bucket_bytes=256)
    single = Model()
    reference = cls(single.parameters(), **options)
    for step in range(4):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not as_view)
        totals = [torch.zeros_like(p) for p in single.parameters()]
        for other in range(WORLD_SIZE):
            single.zero_grad()
            backward(single, other, step)
            for total, p in zip(totals, single.parameters()):
                total += p.grad / WORLD_SIZE  # exact: a power of two
        for total, p in zip(totals, single.parameters()):
            p.grad = total
        reference.step()
    assert_same_bits(model.parameters(), single.parameters())
    assert_same_state(optimizer, reference)
    headroom.state.check_same_state(optimizer)


@EITHER
@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_has_the_bits_of_one_process(ranks, cls, options, as_view):
    ranks(ddp, cls, options, as_view)


# ---- FSDP2 ---------------------------------------------------------------------------------------


def fsdp_against_torch(rank):
    model, other = sharded(), sharded()
    optimizer = ADAMW(model.parameters(), **OPTIONS)
    theirs = torch.optim.AdamW(other.parameters(), **OPTIONS)
    train(model, optimizer, rank, range(10))
    train(other, theirs, rank, range(10))
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p.to_local(), q.to_local(), rtol=1e-5, atol=1e-6)
        for name, state in theirs.state[q].items():
            ours = optimizer.state[p][name]
            assert type(ours) is type(state) and ours.shape == state.shape
            if name != "step":
                assert ours.placements == state.placements
                torch.testing.assert_close(ours.to_local(), state.to_local(), rtol=1e-5, atol=1e-7)


def test_fsdp2_agrees_with_torch(ranks):
    ranks(fsdp_against_torch)


def mixed_precision(rank, param, compute, grad):
    """Gradients of another dtype than the parameters: torch's optimizers refuse both ways."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=grad)
    model = sharded(Model().to(param), mp_policy=policy)
    unsharded = Model().to(param)
    for p in [*model.parameters(), *unsharded.parameters()]:
        p.grad_dtype = grad
    optimizer = ADAMW(model.parameters(), **OPTIONS)
    reference = ADAMW(unsharded.parameters(), **OPTIONS)
    for step in range(3):
        backward(model, rank, step, compute)
        for p, q in zip(model.parameters(), unsharded.parameters()):
            assert p.grad.dtype == grad and p.dtype == param
            q.grad = p.grad.full_tensor()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    assert_same_bits(whole(model.parameters()), unsharded.parameters())
    assert_same_state(optimizer, reference)


@pytest.mark.parametrize(
    "param, compute, grad",
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_fsdp2_mixed_precision(ranks, param, compute, grad):
    ranks(mixed_precision, param, compute, grad)


def released(rank, cls, options, clip):
    """Parameters of two wrapped modules and of the root, stepped inside backward."""
    nets, optimizers = [], []
    for _ in range(2):
        model = Model()
        for part in (model.first, model.second):
            fully_shard(part, mesh=mesh())
        nets.append(sharded(model))
        optimizers.append(cls(model.parameters(), **options, max_grad_norm=1e-3 if clip else None))
    handle = headroom.release_gradients(nets[1], optimizers[1], clip=clip, bucket_bytes=64)
    for step in range(3):
        backward(nets[0], rank, step)
        if clip:
            with handle.measure():
                backward(nets[1], rank, step)
        backward(nets[1], rank, step)
        assert all(p.grad is None for p in nets[1].parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if clip:
        assert optimizers[0].grad_norm > 1e-3
        norms = [optimizer.grad_norm for optimizer in optimizers]
        torch.testing.assert_close(*norms, rtol=2**-20, atol=0)
        for p, q in zip(*(whole(net.parameters()) for net in nets)):
            torch.testing.assert_close(p, q, rtol=2**-18, atol=2**-18)
    else:
        assert_same_bits(*(whole(net.parameters()) for net in nets))


@EITHER
@pytest.mark.parametrize("clip", [None, "two-pass"])
def test_fsdp2_with_released_gradients(ranks, cls, options, clip):
    ranks(released, cls, options, clip)


def released_into_an_accumulator(rank, wrap):
    nets, optimizers = [], []
    for k in range(2):
        net = DistributedDataParallel(Model()) if wrap == "ddp" else sharded()
        optimizer = ADAMW(net.parameters(), **OPTIONS, max_grad_norm=1e-3)
        accumulator = headroom.GradAccumulator(net)
        if k:
            headroom.release_gradients(net, optimizer, accumulator=accumulator)
        for step in range(4):
            with accumulator.micro_batch(weight=1 + step):
                backward(net, rank, step)
            if step % 2:
                accumulator.finish()
                optimizer.step()
                optimizer.zero_grad()
        nets.append(net)
        optimizers.append(optimizer)
    assert_same_bits(*(whole(net.parameters()) for net in nets))
    assert_same_state(*optimizers)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_gradients_released_into_an_accumulator(ranks, wrap):
    ranks(released_into_an_accumulator, wrap)


# ---- DTensors made by hand -----------------------------------------------------------------------


PLACEMENTS = {"row": Shard(0), "column": Shard(1), "replicate": Replicate(), "partial": Partial()}


def by_hand(rank, param_placement, grad_placement):
    """Beside a plain parameter in their group."""
    placement, grad_placement = PLACEMENTS[param_placement], PLACEMENTS[grad_placement]
    values = torch.randn(2, 5, 3)  # the same on both ranks
    unsharded, plain = (torch.nn.Parameter(values[0].clone()) for _ in range(2))
    param = torch.nn.Parameter(distribute_tensor(values[0], mesh(), [placement]))
    optimizer, reference = ADAMW([plain, param], **OPTIONS), ADAMW([unsharded], **OPTIONS)
    for step in range(3):
        unsharded.grad = values[1] * (step + 1)
        plain.grad = unsharded.grad.clone() if step < 2 else None
        if grad_placement.is_partial():
            local = unsharded.grad * (0.25 if rank == 0 else 0.75)
            unsharded.grad = unsharded.grad * 0.25 + unsharded.grad * 0.75
            grad = DTensor.from_local(local, mesh(), [grad_placement])
        else:
            grad = distribute_tensor(unsharded.grad, mesh(), [grad_placement])
        param.grad = grad
        optimizer.step()
        reference.step()
        assert param.grad is grad and grad.placements == (grad_placement,)
    assert param.placements == (placement,)
    assert_same_bits(whole([param]), [unsharded])
    assert_same_bits(whole(optimizer.state[param].values()), reference.state[unsharded].values())
    assert optimizer.state[param]["exp_avg"].placements == (placement,)
    assert optimizer.state[plain]["step"] == 2


@pytest.mark.parametrize("grad", PLACEMENTS)
@pytest.mark.parametrize("param", ["row", "column", "replicate"])
def test_dtensors_made_by_hand(ranks, param, grad):
    ranks(by_hand, param, grad)


def compiled(rank, cls, options):
    values = torch.randn(2, 6, 256)
    unsharded = torch.nn.Parameter(values[0].clone())
    param = torch.nn.Parameter(distribute_tensor(values[0], mesh(), [Shard(0)]))
    optimizer, reference = cls([param], **options), cls([unsharded], **options)
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    for k in range(3):
        unsharded.grad = values[1] * (k + 1)
        param.grad = distribute_tensor(unsharded.grad, mesh(), [Shard(0)])
        step()
        reference.step()
    assert_same_bits(whole([param]), [unsharded])
    assert_same_state(optimizer, reference)


@pytest.mark.parametrize("eight_bit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_step_on_dtensors(ranks, eight_bit):
    codes = headroom.optim.AdamW8bit, OPTIONS | {"min_8bit_size": 5}
    ranks(compiled, *(codes if eight_bit else (ADAMW, OPTIONS)))


# ---- ZeRO ----------------------------------------------------------------------------------------


def zero(rank, cls, options):
    model, single = Model(), Model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cls, **options)
    reference = cls(single.parameters(), **options)
    for step in range(4):
        backward(model, 0, step)
        backward(single, 0, step)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert_same_bits(model.parameters(), single.parameters())
    assert 0 < len(optimizer.optim.state) < len(reference.state)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        whole_state = optimizer.state_dict()
        resumed = cls(Model().parameters(), **options)
        resumed.load_state_dict(whole_state)
        assert_same_state(resumed, reference)


@EITHER
def test_zero_redundancy_optimizer(ranks, cls, options):
    ranks(zero, cls, options)


# ---- Weights in 16 bits --------------------------------------------------------------------------


MODES = [
    dict(master="f32"),
    dict(master="remainder16"),
    dict(master="remainder8", rounding="stochastic"),
    dict(rounding="stochastic", seed=5),
    dict(rounding="kahan"),
]


def sixteen_bits(rank, cls, options, mode):
    """Shards of rows, of columns, and uneven ones take the bits of the whole, random ones too."""
    generator = torch.Generator().manual_seed(3)
    values = [
        torch.randn(shape, generator=generator).bfloat16() for shape in [(7, 64), (1, 3), (4, 6, 5)]
    ]
    for placement in (Shard(0), Shard(1), Replicate()):
        single = [torch.nn.Parameter(value.clone()) for value in values]
        sharded = [
            torch.nn.Parameter(distribute_tensor(value, mesh(), [placement])) for value in values
        ]
        reference, optimizer = cls(single, **options, **mode), cls(sharded, **options, **mode)
        for _ in range(3):
            for param, other in zip(single, sharded):
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
                other.grad = distribute_tensor(param.grad, mesh(), [placement])
            reference.step()
            optimizer.step()
        assert_same_bits(whole(sharded), single)
        exact, joined = (
            headroom.optim.master_weights(reference),
            headroom.optim.master_weights(optimizer),
        )
        assert_same_bits(whole(joined[p] for p in sharded), [exact[p] for p in single])
        headroom.optim.load_master_weights(optimizer, joined)
        again = headroom.optim.master_weights(optimizer)
        assert_same_bits(whole(again[p] for p in sharded), [exact[p] for p in single])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_weights_in_16_bits_do_not_depend_on_the_sharding(ranks, mode):
    ranks(sixteen_bits, ADAMW, OPTIONS, mode)
