"""AdamW8bit in two processes: FSDP2, DTensors, distributed checkpoints.

The functions without `test_` in their name run on both ranks (helpers/ranks.py). Blocks are
local to a shard. Where rows are whole blocks and shards are rows, blocks are those of one process,
and so are all bits.
"""

import copy

import headroom
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from helpers import training
from helpers.bits import assert_same_bits, bits, special
from helpers.dcp import loaded, saved
from helpers.mesh import mesh, whole
from helpers.ranks import WORLD_SIZE

pytestmark = pytest.mark.gloo
ADAMW8BIT = headroom.optim.AdamW8bit
OPTIONS = dict(lr=1e-2, weight_decay=0.1, min_8bit_size=1000)
CODES = "step", "exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax"
FLOATS = CODES[:3]


class Model(torch.nn.Module):
    """8-bit moments by the whole size alone: a shard of `even` or `uneven` has less than 1000. Rows
    of `even`, `uneven` and `one` are whole blocks; rank 1 has 2 rows of `uneven` and none of `one`,
    and fewer elements of `odd`. The others are small."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.even = torch.nn.Linear(256, 6, bias=False)
        self.uneven = torch.nn.Parameter(torch.randn(5, 256))
        self.one = torch.nn.Parameter(torch.randn(1, 1024))
        self.odd = torch.nn.Parameter(torch.randn(7, 300))
        self.small = torch.nn.Linear(6, 1)

    def forward(self, x):
        hidden = self.even(x * self.uneven.sum(0) + self.one[0, :256])
        return self.small(torch.tanh(hidden)) + self.odd.square().mean() + self.one.mean()


WHOLE_ROWS = "even.weight", "uneven", "one"
SMALL = "small.weight", "small.bias"


def sharded(model=None, **policy):
    return fully_shard(model or Model(), mesh=mesh(), **policy)


def backward(model, seed, dtype=torch.float32):
    """The same batch on every rank."""
    batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(batch).square().mean().backward()


def train(model, optimizer, steps):
    training.train(optimizer, steps, lambda step: backward(model, step))


def named(model):
    """In one order, which sharding changes otherwise."""
    return dict(sorted(model.named_parameters()))


def names_of(name, optimizer, param):
    names = FLOATS if name in SMALL else CODES
    assert set(optimizer.state[param]) == set(names), name
    return names


def assert_same_shards(model, optimizer, other, other_optimizer):
    """Local parts, byte for byte."""
    for name, p in named(model).items():
        q = named(other)[name]
        assert_same_bits([p.to_local()], [q.to_local()])
        for key in names_of(name, optimizer, p):
            left, right = optimizer.state[p][key], other_optimizer.state[q][key]
            assert type(left) is type(right) and left.shape == right.shape
            assert_same_bits(*([t.to_local()] if key != "step" else [t] for t in (left, right)))


# ---- FSDP2 ---------------------------------------------------------------------------------------


def fsdp(rank, options):
    model, single = sharded(), Model()
    optimizer = ADAMW8BIT(model.parameters(), **OPTIONS, **options)
    reference = ADAMW8BIT(single.parameters(), **OPTIONS, **options)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        for name, p in named(model).items():
            named(single)[name].grad = p.grad.full_tensor()
        optimizer.step()
        reference.step()
    for name, p in named(model).items():
        alone, keys = named(single)[name], names_of(name, optimizer, p)
        for key in keys:
            state = optimizer.state[p][key]
            if key == "step":
                assert state == 4
                continue
            assert isinstance(state, DTensor) and state.placements == p.placements
            assert state.device_mesh == p.device_mesh
            if key.endswith("absmax"):
                rows = p.to_local().shape[0]
                wanted = (rows, p.shape[1] // 256) if name in WHOLE_ROWS else (1, 1, 5)  # of 4 rows
                assert state.to_local().shape == wanted
            else:
                assert state.shape == p.shape and state.to_local().shape == p.to_local().shape
        if name != "odd":
            assert_same_bits(whole([p]), [alone])
            assert_same_bits(
                whole(optimizer.state[p][key] for key in keys),
                [reference.state[alone][key] for key in keys],
            )
        else:
            # Blocks of each shard: as if the shard were a tensor of its own.
            torch.testing.assert_close(p.full_tensor(), alone.detach(), rtol=0.1, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nonfinite": "skip_element"},
        {"nonfinite": "skip_step"},
        {"max_grad_norm": 1e9},
        {"bnb_exact": True},
    ],
)
def test_fsdp2_has_the_bits_of_one_process(ranks, options):
    ranks(fsdp, options)


def local_blocks(rank, shape, placement):
    """A shard gives the bits of the same step on its elements alone."""
    values, grads = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    param = torch.nn.Parameter(distribute_tensor(values, mesh(), [placement]))
    alone = torch.nn.Parameter(param.to_local().detach().clone())
    optimizer, reference = (ADAMW8BIT([p], min_8bit_size=0, lr=1e-2) for p in (param, alone))
    for k in range(3):
        param.grad = distribute_tensor(grads * (k + 1), mesh(), [placement])
        alone.grad = param.grad.to_local().contiguous()
        optimizer.step()
        reference.step()
    assert_same_bits([param.to_local()], [alone])
    blocks = -(-alone.numel() // 256)
    for key in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[param]
        assert_same_bits([state[key].to_local()], [reference.state[alone][key]])
        scales = state[f"{key}_absmax"].to_local().flatten()
        assert_same_bits([scales[:blocks]], [reference.state[alone][f"{key}_absmax"].flatten()])
        assert not scales[blocks:].any()
        assert state[f"{key}_absmax"].full_tensor().dim() == state[f"{key}_absmax"].dim()


LOCAL = {
    "rows": ((7, 300), Shard(0)),
    "columns": ((7, 301), Shard(1)),
    "columns of whole blocks": ((7, 1024), Shard(1)),
    "replicated": ((7, 300), Replicate()),
    "rows of whole blocks, replicated": ((7, 512), Replicate()),
    "one row": ((1, 300), Shard(0)),
    "a vector": ((999,), Shard(0)),
    "three dimensions": ((3, 4, 128), Shard(1)),
    "empty": ((0, 256), Shard(0)),
}


@pytest.mark.parametrize("shape, placement", LOCAL.values(), ids=LOCAL)
def test_blocks_are_local_to_a_shard(ranks, shape, placement):
    ranks(local_blocks, shape, placement)


def strided_shards(rank, dims):
    """Tensor parallelism, then FSDP2 over it: rows are sharded twice, in an order of their own."""
    where = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp"))
    model, single = Model(), Model()
    plan = {"even": ColwiseParallel(output_layouts=Replicate())}
    fully_shard(parallelize_module(model, where["tp"], plan), mesh=where["dp"])
    optimizer = ADAMW8BIT(model.parameters(), **OPTIONS)
    reference = ADAMW8BIT(single.parameters(), **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        single.even.weight.grad = model.even.weight.grad.full_tensor()
        optimizer.step()
        reference.step()
    p, alone = model.even.weight, single.even.weight
    state = optimizer.state[p]
    assert state["exp_avg_absmax"].placements == p.placements and len(p.placements) == 2
    assert state["exp_avg_absmax"].to_local().shape == (3, 1)
    keys = CODES[1:]
    assert_same_bits(whole([p]), [alone])
    assert_same_bits(
        whole(state[key] for key in keys), [reference.state[alone][key] for key in keys]
    )


def strided_blocks(rank, dims):
    """Of rows that are not whole blocks: scales are sharded wherever the parameter is."""
    where = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(300, 8))
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    fully_shard(parallelize_module(model, where["tp"], plan), mesh=where["dp"])
    optimizer = ADAMW8BIT(model.parameters(), min_8bit_size=1000)
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    for name in ("exp_avg_absmax", "exp_avg_sq_absmax"):
        scales = optimizer.state[model[0].weight][name]
        assert scales.placements == (Shard(0), Shard(0)) and scales.shape == (2, 1, 5)
        assert scales.to_local().shape == (1, 1, 5)  # of 1200 elements


@pytest.mark.parametrize("dims", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("what", [strided_shards, strided_blocks])
def test_tensor_parallel_and_fsdp2(ranks, what, dims):
    ranks(what, dims)


def mixed_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, single = sharded(mp_policy=policy), Model()
    for p in [*model.parameters(), *single.parameters()]:
        p.grad_dtype = torch.bfloat16
    optimizer, reference = (ADAMW8BIT(m.parameters(), **OPTIONS) for m in (model, single))
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, torch.bfloat16)
        for name, p in named(model).items():
            named(single)[name].grad = p.grad.full_tensor()
        optimizer.step()
        reference.step()
    for name in (*WHOLE_ROWS, *SMALL):
        assert_same_bits(whole([named(model)[name]]), [named(single)[name]])


def test_fsdp2_mixed_precision(ranks):
    ranks(mixed_precision)


def skip(rank, scaled, bad_rank):
    """A NaN in one shard: no byte moves on any rank, with a scaler or without."""
    model = sharded()
    nonfinite = "propagate" if scaled else "skip_step"
    optimizer = ADAMW8BIT(model.parameters(), **OPTIONS, nonfinite=nonfinite)
    scaler = headroom.amp.GradScaler("cpu", enabled=scaled)
    scaler.scale(torch.zeros(()))
    for step, bad in enumerate([False, True, False]):
        optimizer.zero_grad()
        backward(model, step)
        if bad and rank == bad_rank:
            model.even.weight.grad.to_local()[0, 0] = float("nan")
        held = [p.to_local() for p in model.parameters()]
        held += [t.to_local() if isinstance(t, DTensor) else t for t in values(optimizer)]
        before = [bits(t).clone() for t in held]
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(bits(t), b) for t, b in zip(held, before)) == bad
    assert all(entry["step"] == 2 for entry in optimizer.state.values())


def values(optimizer):
    return [value for entry in optimizer.state.values() for value in entry.values()]


@pytest.mark.parametrize("bad_rank", range(WORLD_SIZE))
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_all_ranks_skip_when_one_shard_has_a_nan(ranks, scaled, bad_rank):
    ranks(skip, scaled, bad_rank)


def randomness(rank):
    """Shards draw different numbers: equal rows of both ranks get different codes."""
    row = torch.randn(1, 2048, generator=torch.Generator().manual_seed(1))
    param = torch.nn.Parameter(distribute_tensor(row.repeat(2, 1), mesh(), [Shard(0)]))
    param.grad = distribute_tensor(row.repeat(2, 1), mesh(), [Shard(0)])
    optimizer = ADAMW8BIT([param], min_8bit_size=0, code_rounding="stochastic")
    optimizer.step()
    first, second = optimizer.state[param]["exp_avg"].full_tensor()
    assert 0.1 < (first != second).float().mean() < 0.9


def test_shards_draw_different_numbers(ranks):
    ranks(randomness)


def compiled(rank):
    model, other = sharded(), sharded()
    optimizer, reference = (ADAMW8BIT(m.parameters(), **OPTIONS) for m in (model, other))
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    for k in range(2):
        for m, run in ((model, step), (other, reference.step)):
            m.zero_grad()
            backward(m, k)
            run()
    assert_same_shards(model, optimizer, other, reference)


def test_compiled_step_on_dtensors(ranks):
    ranks(compiled)


def reports(rank):
    model = sharded()
    optimizer = ADAMW8BIT(model.named_parameters(), **OPTIONS)
    before = {row.dtypes: (set(row.names), row.numel) for row in optimizer.memory()}
    train(model, optimizer, range(1))
    rows = {row.dtypes[0]: row for row in optimizer.memory()}
    assert {row.dtypes: (set(row.names), row.numel) for row in rows.values()} == before
    assert set(rows["float32"].names) == {f"'{name}'" for name in SMALL}
    large = [p for name, p in named(model).items() if name not in SMALL]
    assert rows["uint8"].numel == sum(p.to_local().numel() for p in large)
    for key in CODES[1:]:
        held = sum(optimizer.state[p][key].to_local().nbytes for p in large)
        assert rows["uint8"].bytes[key] == held


def test_memory_is_that_of_this_rank(ranks):
    ranks(reports)


# ---- Checkpoints ---------------------------------------------------------------------------------


def initial_state(rank, dtype):
    """Torch makes the states that a checkpoint goes to by a step with lr 0."""
    values = special(dtype).repeat(1, 300)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distribute_tensor(values, mesh(), [Shard(0)]))
    optimizer = ADAMW8BIT(module.parameters(), lr=1e-2, weight_decay=0.1, min_8bit_size=0)
    state = get_optimizer_state_dict(module, optimizer)["state"]["weight"]
    assert_same_bits(whole([module.weight]), [values])
    assert set(state) == set(CODES) and state["exp_avg"].dtype == torch.uint8
    for name in ("exp_avg_absmax", "exp_avg_sq_absmax"):
        assert state[name].full_tensor().count_nonzero() == 0
    assert module.weight.grad is None and optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_is_created_without_touching_parameters(ranks, dtype):
    ranks(initial_state, dtype)


def resume(rank, path, flatten):
    options = OPTIONS | {"code_rounding": "stochastic", "seed": 5}
    model = sharded()
    optimizer = ADAMW8BIT(model.parameters(), **options)
    train(model, optimizer, range(3))
    saved(model, optimizer, path, flatten_optimizer_state_dict=flatten)
    train(model, optimizer, range(3, 5))
    resumed = sharded(Model().apply(lambda m: [p.data.zero_() for p in m.parameters()]))
    other = ADAMW8BIT(resumed.parameters(), **options)
    loaded(resumed, other, path, flatten_optimizer_state_dict=flatten)
    assert all(entry["step"] == 3 for entry in other.state.values())
    train(resumed, other, range(3, 5))
    assert_same_shards(model, optimizer, resumed, other)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_resume_from_a_distributed_checkpoint(ranks, tmp_path, flatten):
    ranks(resume, tmp_path / "checkpoint", flatten)


class Aligned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        model = Model()
        self.even, self.uneven, self.one = model.even, model.uneven, model.one
        self.small = model.small

    def forward(self, x):
        hidden = self.even(x * self.uneven.sum(0) + self.one[0, :256])
        return self.small(torch.tanh(hidden)) + self.one.mean()


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def reshard(rank):
    """From shards to a whole model in one process, and from there to shards again."""
    model = sharded(Aligned())
    optimizer = ADAMW8BIT(model.parameters(), **OPTIONS)
    train(model, optimizer, range(3))
    full = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
    single = Aligned()
    for name, value in zip(named(model), whole(named(model).values())):
        named(single)[name].data.copy_(value)
    reference = ADAMW8BIT(single.parameters(), **OPTIONS)
    again = {}
    if rank == 0:  # rank 1 has an empty dict
        set_optimizer_state_dict(single, reference, full, options=FULL)
        for name, p in named(single).items():
            for key in names_of(name, reference, p):
                assert_same_bits([reference.state[p][key]], [full["state"][name][key]])
        again = copy.deepcopy(get_optimizer_state_dict(single, reference, options=FULL))
    resumed = sharded(Aligned())
    other = ADAMW8BIT(resumed.parameters(), **OPTIONS)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(resumed, other, again, options=options)
    resumed.load_state_dict(model.state_dict())
    train(model, optimizer, range(3, 5))
    train(resumed, other, range(3, 5))
    assert_same_shards(model, optimizer, resumed, other)


def test_full_state_dict_reshards_whole_blocks(ranks):
    ranks(reshard)


def refused(rank, shape, dim, words):
    """Blocks of two shards are none of one process, even where there are as many: an error."""
    module, single = torch.nn.Module(), torch.nn.Module()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    module.weight = torch.nn.Parameter(distribute_tensor(values, mesh(), [Shard(dim)]))
    single.weight = torch.nn.Parameter(values)
    optimizer, reference = (
        ADAMW8BIT(m.named_parameters(), min_8bit_size=0) for m in (module, single)
    )
    full = get_optimizer_state_dict(module, optimizer, options=FULL)
    if rank == 0:
        with pytest.raises(ValueError, match=words):
            set_optimizer_state_dict(single, reference, full, options=FULL)


OTHER_BLOCKS = {
    "uneven rows": ((7, 300), 0, r"\(2, 1, 5\), wanted a tensor of shape \(9,\)"),
    "as many blocks": ((6, 300), 0, r"\(2, 1, 4\), wanted a tensor of shape \(8,\)"),
    "columns": ((2, 2048), 1, r"\(2, 1, 1, 8\), wanted a tensor of shape \(2, 8\)"),
}


@pytest.mark.parametrize("shape, dim, words", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_other_blocks_are_refused(ranks, shape, dim, words):
    words = rf"'exp_avg_absmax' of parameter 'weight' is {words}; .*load_sharded\(\) loads"
    ranks(refused, shape, dim, words)


def from_float32(rank, path):
    """A checkpoint of torch's AdamW goes on in float32."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    other = ADAMW8BIT(model.parameters(), **OPTIONS)
    set_optimizer_state_dict(model, other, state["optimizer"])
    train(model, other, range(2, 3))
    for entry in other.state.values():
        assert set(entry) == set(FLOATS) and entry["step"] == 3
        assert entry["exp_avg"].dtype == torch.float32


def test_a_checkpoint_of_torch_goes_on_in_float32(ranks, tmp_path):
    ranks(from_float32, tmp_path / "checkpoint")
