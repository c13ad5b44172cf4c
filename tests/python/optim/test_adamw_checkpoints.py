"""States of optimizers in two processes: distributed checkpoints and resharding.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import headroom
import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from helpers.sharded_adamw import (
    ADAMW,
    OPTIONS,
    Model,
    assert_same_state,
    backward,
    sharded,
    states,
    train,
)

pytestmark = pytest.mark.gloo


# ---- distributed checkpoints ---------------------------------------------------------------------


def initial_state(rank, dtype, lr):
    param = torch.nn.Parameter(distribute_tensor(special(dtype), mesh(), [Shard(0)]))
    module = torch.nn.Module()
    module.weight = param
    optimizer = ADAMW(module.parameters(), lr=lr, amsgrad=True)
    loaded = get_optimizer_state_dict(module, optimizer)
    assert_same_bits(whole([param]), [special(dtype)])
    assert set(loaded["state"]["weight"]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert set(optimizer.state[param]) == set(loaded["state"]["weight"])
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert whole([optimizer.state[param][name]])[0].count_nonzero() == 0
    assert optimizer.param_groups[0]["lr"] is lr
    assert param.grad is None


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_is_created_without_touching_parameters(ranks, dtype, tensor_lr):
    ranks(initial_state, dtype, torch.tensor(1e-2) if tensor_lr else 1e-2)


def resume(rank, path, options, flatten):
    model = sharded()
    optimizer = ADAMW(model.parameters(), **OPTIONS, **options)
    train(model, optimizer, rank, range(3))
    saved(model, optimizer, path, flatten_optimizer_state_dict=flatten)
    train(model, optimizer, rank, range(3, 6))

    resumed = sharded(Model().apply(lambda m: [p.data.zero_() for p in m.parameters()]))
    other = ADAMW(resumed.parameters(), **OPTIONS, **options)
    loaded(resumed, other, path, flatten_optimizer_state_dict=flatten)
    names = ["step", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * options.get("amsgrad", False)
    assert set(other.state[resumed.gain]) == set(names)
    assert other.state[resumed.gain]["exp_avg"].dtype == options.get("state_dtype", torch.float32)
    train(resumed, other, rank, range(3, 6))
    assert_same_bits(whole(resumed.parameters()), whole(model.parameters()))
    assert_same_state(other, optimizer, names)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"state_dtype": torch.bfloat16}],
    ids=["default", "amsgrad", "state_dtype"],
)
def test_resume_from_a_distributed_checkpoint(ranks, tmp_path, options, flatten):
    ranks(resume, tmp_path / "checkpoint", options, flatten)


def exchange(rank, path, source, target):
    """A checkpoint of one optimizer resumes the other: compared with a run that never changed."""
    model, unchanged = sharded(), sharded()
    optimizer = source(model.parameters(), **OPTIONS)
    reference = target(unchanged.parameters(), **OPTIONS)
    train(model, optimizer, rank, range(3))
    train(unchanged, reference, rank, range(6))
    saved(model, optimizer, path)

    resumed = sharded()
    other = target(resumed.parameters(), **OPTIONS)
    loaded(resumed, other, path)
    assert_same_bits(whole(states(other, "exp_avg")), whole(states(optimizer, "exp_avg")))
    train(resumed, other, rank, range(3, 6))
    for p, q in zip(whole(resumed.parameters()), whole(unchanged.parameters())):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert all(step == 6 for step in states(other, "step"))


@pytest.mark.parametrize(
    "source, target", [(torch.optim.AdamW, ADAMW), (ADAMW, torch.optim.AdamW)], ids=["in", "out"]
)
def test_checkpoints_of_torch_and_headroom_resume_each_other(ranks, tmp_path, source, target):
    ranks(exchange, tmp_path / "checkpoint", source, target)


def reshard(rank, options):
    """From two shards to one whole and back."""
    model = sharded()
    optimizer = ADAMW(model.parameters(), **OPTIONS, **options)
    train(model, optimizer, rank, range(3))
    full = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    values = whole(model.parameters())
    if rank == 0:  # rank 1 gets an empty dict
        plain = Model()
        for p, value in zip(plain.parameters(), values):
            p.data.copy_(value)
        single = ADAMW(plain.parameters(), **OPTIONS, **options)
        set_optimizer_state_dict(
            plain, single, full, options=StateDictOptions(full_state_dict=True)
        )
        names = [name for name, _ in plain.named_parameters()]
        assert_same_bits(states(single, "exp_avg"), [full["state"][n]["exp_avg"] for n in names])
    resumed = sharded()
    other = ADAMW(resumed.parameters(), **OPTIONS, **options)
    set_optimizer_state_dict(
        resumed,
        other,
        full,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    assert_same_state(other, optimizer)


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}], ids=str)
def test_full_state_dict_reshards(ranks, options):
    ranks(reshard, options)


# ---- Weights in 16 bits --------------------------------------------------------------------------


def sharded_checkpoint(rank, path):
    def make():
        model = headroom.cast_model(Model(), torch.bfloat16, keep=["second"])
        fully_shard(model.second, mesh=mesh())  # FSDP2 wants one dtype in what it gathers together
        model = sharded(model)
        return model, ADAMW(model.parameters(), **OPTIONS, master="remainder16")

    def steps(model, optimizer, seeds):
        for seed in seeds:
            backward(model, rank, seed, torch.bfloat16)
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
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_optimizer_state_dict(model, optimizer, options=full)
    parameters = whole(model.parameters())
    if rank == 0:
        names = [name for name, _ in model.named_parameters()]
        single = dict(zip(names, map(torch.nn.Parameter, parameters)))
        last = ADAMW(single.items(), **OPTIONS, master="remainder16")
        state = {i: gathered["state"][name] for i, name in enumerate(names)}
        last.load_state_dict({"state": state, "param_groups": last.state_dict()["param_groups"]})
        joined = headroom.optim.master_weights(last)
        local = [weights[0][p].to_local() for p in model.parameters()]
        for one, param in zip(local, single.values()):
            assert_same_bits([one], [joined[param][: len(one)]])


def test_remainders_survive_a_sharded_checkpoint(ranks, tmp_path):
    ranks(sharded_checkpoint, str(tmp_path))
