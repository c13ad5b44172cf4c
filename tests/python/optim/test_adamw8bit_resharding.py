"""States of AdamW8bit on two ranks through distributed checkpoints and full state dicts: their
blocks stay whole, or they are refused.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.bits import assert_same_bits, special
from helpers.dcp import loaded, saved
from helpers.mesh import mesh, whole
from helpers.sharded8bit import (
    ADAMW8BIT,
    CODES,
    FLOATS,
    OPTIONS,
    Model,
    assert_same_shards,
    named,
    names_of,
    sharded,
    train,
)

pytestmark = pytest.mark.gloo


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
