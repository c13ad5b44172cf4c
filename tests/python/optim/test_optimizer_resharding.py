"""States of every optimizer in two processes: through distributed checkpoints, and from shards to a
whole model and back. Blocks of 8-bit moments stay whole, or they are refused.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import copy

import headroom
import pytest
import torch
import torch.distributed.checkpoint as dcp
from headroom._core.dtensor import local_part
from headroom.optim import SGD, Adafactor, AdamW, AdamW8bit, Lion8bit, Muon8bit
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.bits import assert_same_bits, special
from helpers.dcp import loaded, saved
from helpers.mesh import mesh, whole
from helpers.modes import Mode
from helpers.sharded8bit import Model, assert_same_shards, backward, named, sharded, train

pytestmark = pytest.mark.gloo
ADAM, CODES = {"lr": 1e-2, "weight_decay": 0.1}, {"min_8bit_size": 1000}
ROWS = {
    "AdamW": Mode(AdamW, ADAM),
    "amsgrad": Mode(AdamW, ADAM | {"amsgrad": True}),
    "state_dtype": Mode(AdamW, ADAM | {"state_dtype": torch.bfloat16}),
    "AdamW8bit": Mode(AdamW8bit, ADAM | CODES | {"code_rounding": "stochastic", "seed": 5}),
    "SGD": Mode(SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Lion8bit": Mode(Lion8bit, {"lr": 1e-3} | CODES),
    "Adafactor": Mode(Adafactor, {"weight_decay": 0.1}),
    "Adafactor-hf": Mode(Adafactor, {"semantics": "hf", "beta1": 0.9}),
    "Muon8bit": Mode(Muon8bit, {"lr": 1e-2} | CODES),
}
EACH = pytest.mark.parametrize("name", ROWS)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


# ---- distributed checkpoints ---------------------------------------------------------------------


def initial_state(rank, name, dtype, lr):
    """Torch makes the states that a checkpoint goes to by a step with lr 0."""
    values = special(dtype).repeat(1, 300)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distribute_tensor(values, mesh(), [Shard(0)]))
    optimizer = ROWS[name].make(module.parameters(), lr=lr)
    state = get_optimizer_state_dict(module, optimizer)["state"]["weight"]
    assert_same_bits(whole([module.weight]), [values])
    held = optimizer.state[module.weight]
    assert state.keys() == held.keys() and len(state) > 1
    for key in held.keys() - {"step"}:
        if held[key].is_floating_point():
            assert whole([held[key]])[0].count_nonzero() == 0, key
    assert module.weight.grad is None and optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW8bit", "amsgrad", "state_dtype", "SGD", "Lion8bit"])
def test_state_is_created_without_touching_parameters(ranks, name, dtype, tensor_lr):
    ranks(initial_state, name, dtype, torch.tensor(1e-2) if tensor_lr else 1e-2)


def resume(rank, path, name, flatten):
    model = sharded()
    optimizer = ROWS[name].make(model.parameters())
    train(model, optimizer, range(3))
    saved(model, optimizer, path, flatten_optimizer_state_dict=flatten)
    train(model, optimizer, range(3, 5))
    resumed = sharded(Model().apply(lambda m: [p.data.zero_() for p in m.parameters()]))
    other = ROWS[name].make(resumed.parameters())
    loaded(resumed, other, path, flatten_optimizer_state_dict=flatten)
    train(resumed, other, range(3, 5))
    assert_same_shards(model, optimizer, resumed, other)


@EACH
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_resume_from_a_distributed_checkpoint(ranks, tmp_path, name, flatten):
    ranks(resume, tmp_path / "checkpoint", name, flatten)


def exchange(rank, path, source, target, options):
    """A checkpoint of one optimizer resumes the other: compared with a run that never changed.
    States that torch brings stay in float32."""
    model, unchanged = sharded(), sharded()
    optimizer = source(model.parameters(), **options)
    reference = source(unchanged.parameters(), **options)
    train(model, optimizer, range(3))
    train(unchanged, reference, range(6))
    saved(model, optimizer, path)
    resumed = sharded()
    other = target(resumed.parameters(), **options)
    if target in (AdamW8bit, SGD):  # which have options or states that torch lacks
        state = {"optimizer": get_optimizer_state_dict(unchanged, reference)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(resumed, other, state["optimizer"])
        resumed.load_state_dict(model.state_dict())
    else:
        loaded(resumed, other, path)
    train(resumed, other, range(3, 6))
    for p, q in zip(whole(resumed.parameters()), whole(unchanged.parameters())):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    for entry in other.state.values():
        assert not any(local_part(value).dtype == torch.uint8 for value in entry.values())


OF_SGD = {"lr": 1e-2, "momentum": 0.9}
EXCHANGES = {
    "to AdamW": (torch.optim.AdamW, AdamW, ADAM),
    "to AdamW8bit": (torch.optim.AdamW, AdamW8bit, ADAM),
    "from AdamW": (AdamW, torch.optim.AdamW, ADAM),
    "to SGD": (torch.optim.SGD, SGD, OF_SGD),
    "from SGD": (SGD, torch.optim.SGD, OF_SGD),
}


@pytest.mark.parametrize("source, target, options", EXCHANGES.values(), ids=EXCHANGES)
def test_checkpoints_of_torch_and_headroom_resume_each_other(
    ranks, tmp_path, source, target, options
):
    ranks(exchange, tmp_path / "checkpoint", source, target, options)


# ---- resharding ----------------------------------------------------------------------------------


class Aligned(torch.nn.Module):
    """A model whose rows are whole blocks, or small."""

    def __init__(self):
        super().__init__()
        model = Model()
        self.even, self.uneven, self.one = model.even, model.uneven, model.one
        self.small = model.small

    def forward(self, x):
        hidden = self.even(x * self.uneven.sum(0) + self.one[0, :256])
        return self.small(torch.tanh(hidden)) + self.one.mean()


def reshard(rank, name):
    """From shards to a whole model in one process, and from there to shards again."""
    model = sharded(Aligned())
    optimizer = ROWS[name].make(model.parameters())
    train(model, optimizer, range(3))
    full = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
    single = Aligned()
    for each, value in zip(named(model), whole(named(model).values())):
        named(single)[each].data.copy_(value)
    reference, again = ROWS[name].make(single.parameters()), {}
    if rank == 0:  # rank 1 has an empty dict
        set_optimizer_state_dict(single, reference, full, options=FULL)
        for each, p in named(single).items():
            assert_same_bits(reference.state[p].values(), full["state"][each].values())
        again = copy.deepcopy(get_optimizer_state_dict(single, reference, options=FULL))
    resumed = sharded(Aligned())
    other = ROWS[name].make(resumed.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(resumed, other, again, options=options)
    resumed.load_state_dict(model.state_dict())
    train(model, optimizer, range(3, 5))
    train(resumed, other, range(3, 5))
    assert_same_shards(model, optimizer, resumed, other)


@EACH
def test_full_state_dict_reshards(ranks, name):
    ranks(reshard, name)


def refused(rank, shape, dim, words):
    """Blocks of two shards are none of one process, even where there are as many: an error."""
    module, single = torch.nn.Module(), torch.nn.Module()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    module.weight = torch.nn.Parameter(distribute_tensor(values, mesh(), [Shard(dim)]))
    single.weight = torch.nn.Parameter(values)
    optimizer, reference = (
        AdamW8bit(m.named_parameters(), min_8bit_size=0) for m in (module, single)
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


def whole_states(rank):
    """States of whole tensors are not those of shards: the error names the way to load them."""
    model, single = sharded(), Model()
    optimizer, other = (AdamW(each.parameters()) for each in (model, single))
    backward(single, 0)
    other.step()
    with pytest.raises(ValueError, match="is a Tensor, but the parameter is a DTensor"):
        optimizer.load_state_dict(other.state_dict())


def test_states_of_whole_tensors_are_no_shards(ranks):
    ranks(whole_states)


# ---- weights in 16 bits --------------------------------------------------------------------------


def remainders(rank, path):
    def make():
        model = headroom.cast_model(Model(), torch.bfloat16, keep=["small"])
        fully_shard(model.small, mesh=mesh())  # FSDP2 wants one dtype in what it gathers together
        model = sharded(model)
        return model, AdamW(model.parameters(), **ADAM, master="remainder16")

    def steps(model, optimizer, seeds):
        for seed in seeds:
            backward(model, seed, torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make()
    steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    steps(model, optimizer, range(3, 5))
    resumed, other = make()
    state = {"model": resumed.state_dict(), "optimizer": get_optimizer_state_dict(resumed, other)}
    dcp.load(state, checkpoint_id=path)
    resumed.load_state_dict(state["model"])
    set_optimizer_state_dict(resumed, other, state["optimizer"])
    steps(resumed, other, range(3, 5))
    assert_same_bits(whole(model.parameters()), whole(resumed.parameters()))
    weights = [headroom.optim.master_weights(o) for o in (optimizer, other)]
    assert_same_bits(whole(weights[0].values()), whole(weights[1].values()))
    # Gathered by collectives, which have no int16, into an optimizer that is not sharded.
    gathered = get_optimizer_state_dict(model, optimizer, options=FULL)
    parameters = whole(model.parameters())
    joined = whole(weights[0][p] for p in model.parameters())
    if rank == 0:
        names = [name for name, _ in model.named_parameters()]
        single = dict(zip(names, map(torch.nn.Parameter, parameters)))
        last = AdamW(single.items(), **ADAM, master="remainder16")
        state = {i: gathered["state"][name] for i, name in enumerate(names)}
        last.load_state_dict({"state": state, "param_groups": last.state_dict()["param_groups"]})
        own = headroom.optim.master_weights(last)
        assert_same_bits([own[param] for param in single.values()], joined)


def test_remainders_survive_a_sharded_checkpoint(ranks, tmp_path):
    ranks(remainders, str(tmp_path))
