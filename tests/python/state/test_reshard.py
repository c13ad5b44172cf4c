"""States saved by some ranks and loaded by others: FSDP2 through torch's distributed checkpoint.

The functions without `test_` in their name run on every rank (helpers/ranks.py); one process
is this one, without a process group. A step computes with the moments that are stored, element by
element: where they have the bits that were saved, the next step has the bits of a run that was
never resharded.
"""

import copy
import math

import headroom
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from headroom.state.reshard import load_sharded
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from helpers.bits import assert_same_bits, bits
from helpers.mesh import RESUMMED, whole
from helpers.ranks import Ranks

pytestmark = pytest.mark.gloo
EIGHT = headroom.optim.AdamW8bit
ADAMS = EIGHT, headroom.optim.AdamW
OPTIONS = dict(lr=1e-2, weight_decay=0.1)
# With 4 ranks: uneven and empty shards; one row; blocks that end inside rows; vectors; rows that
# are whole blocks; less than a block; sizes that no number of ranks divides.
SHAPES = {
    "uneven": (7, 300),
    "few rows": (3, 301),
    "one row": (1, 700),
    "many rows": (130, 10),
    "cut inside": (6, 3, 50),
    "vector": (999,),
    "whole blocks": (5, 512),
    "tiny": (2, 3),
}
CASES = {
    "8-bit": (EIGHT, torch.float32, dict(min_8bit_size=7)),
    "8-bit, remainder16": (
        EIGHT,
        torch.bfloat16,
        dict(min_8bit_size=7, block_size=64, master="remainder16"),
    ),
    "bfloat16 moments": (
        headroom.optim.AdamW,
        torch.float32,
        dict(state_dtype=torch.bfloat16, amsgrad=True),
    ),
    "remainder16": (headroom.optim.AdamW, torch.bfloat16, dict(master="remainder16")),
    "adafactor": (headroom.optim.Adafactor, torch.float32, dict(weight_decay=0.1)),
    "adafactor of transformers": (
        headroom.optim.Adafactor,
        torch.bfloat16,
        dict(semantics="hf", lr=1e-3, relative_step=False, beta1=0.9, master="remainder16"),
    ),
}


@pytest.fixture(scope="module")
def run(ranks):
    """Runs a function on a number of ranks."""
    worlds = {2: ranks, 4: Ranks(4)}

    def run(world, function, *arguments):
        if world == 1:
            function(0, *arguments)
        else:
            worlds[world](function, *arguments)

    yield run
    worlds[4].close()


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class Model(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(value))


def make(case):
    cls, dtype, options = CASES[case]
    model = Model(dtype)
    if world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    return model, cls(model.parameters(), **(OPTIONS | options if cls in ADAMS else options))


def step(model, optimizer, seed):
    """With gradients that do not depend on the number of ranks, of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        grad = torch.randn(p.shape, generator=generator)
        grad = (grad * torch.randn(p.shape, generator=generator).mul(3).exp()).to(p.dtype)
        shard = isinstance(p, DTensor)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if shard else grad
    optimizer.step()
    optimizer.zero_grad()


def decoded(entry, name, block_size):
    """A moment as float32 numbers, and the scale of each, whole; collective."""
    codes, scales = entry[name], entry[f"{name}_absmax"]
    local, of_block = (t.to_local() if isinstance(t, DTensor) else t for t in (codes, scales))
    scale = of_block.flatten().repeat_interleave(block_size)[: local.numel()].view(local.shape)
    value = headroom.functional.dynamic_map(name == "exp_avg")[local.long()] * scale
    pair = [value, scale]
    if isinstance(codes, DTensor):
        mesh, places = codes.device_mesh, codes.placements
        more = dict(run_check=False, shape=codes.shape, stride=codes.stride())
        pair = whole(DTensor.from_local(t, mesh, places, **more) for t in pair)
    return pair


def numbers(model, optimizer):
    """Weights, states, and scales of blocks, whole, by parameter and name; collective."""
    found = {}
    states = get_optimizer_state_dict(model, optimizer)["state"]  # remainders as bfloat16 bits
    for name, p in sorted(model.named_parameters()):
        entry, (found[name, "weight"],) = states[name], whole([p])
        for key, value in sorted(entry.items()):
            if f"{key}_absmax" in entry:
                size = optimizer.param_groups[0]["block_size"]
                found[name, key], found[name, f"{key} scale"] = decoded(entry, key, size)
            elif not key.endswith("_absmax"):
                (value,) = whole([value])
                found[name, key] = (
                    value.view(torch.bfloat16) if key == "remainder" else value.clone()
                )
    return found


def save(rank, case, path, flatten):
    """A checkpoint, what it holds, and the weights one step later."""
    model, optimizer = make(case)
    for seed in range(3):
        step(model, optimizer, seed)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save(
        {"model": model.state_dict(), "optimizer": state},
        checkpoint_id=path,
        no_dist=world_size() == 1,
    )
    before, gathered = numbers(model, optimizer), None
    if case == "8-bit":
        options = StateDictOptions(full_state_dict=True)
        gathered = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    step(model, optimizer, 3)
    after = numbers(model, optimizer)
    if rank == 0:
        torch.save((before, after, gathered), path / "numbers.pt")


def kept(shape, block_size, old_ranks, ranks):
    """Which elements are in blocks that lie in one old block, and how many of each there are."""

    def blocks(ranks):
        rows = torch.arange(math.prod(shape)) // math.prod(shape[1:])
        shard = rows // -(-shape[0] // ranks)
        first = torch.searchsorted(shard, shard)
        return shard * 10**6 + (torch.arange(len(shard)) - first) // block_size

    old, new = blocks(old_ranks), blocks(ranks)
    inside = torch.zeros(len(new), dtype=torch.bool)
    counts = [0, 0]
    for block in new.unique():
        one = len(old[new == block].unique()) == 1
        inside[new == block] = one
        counts[not one] += 1
    return inside.view(shape), counts


def load(rank, case, path, old_ranks):
    (was, after, _), ranks = torch.load(path / "numbers.pt"), world_size()
    model, optimizer = make(case)
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=path, no_dist=ranks == 1)
    model.load_state_dict(weights["model"])
    report = load_sharded(path, model, optimizer)
    moments = {(moment.param, moment.name): moment for moment in report.moments}

    now = numbers(model, optimizer)
    assert now.keys() == was.keys()
    size = optimizer.param_groups[0].get("block_size")
    same, expected = {}, set()
    for (name, key), value in now.items():
        if f"{key} scale" in (other for one, other in now if one == name):
            shape = SHAPES[name]
            if name == "whole blocks" and 512 % size == 0:
                inside, counts = torch.ones(shape, dtype=torch.bool), None
            else:
                inside, counts = kept(shape, size, old_ranks, ranks)
            same[name] = inside
            scales = now[name, f"{key} scale"], was[name, f"{key} scale"]
            assert_same_bits([value[inside]], [was[name, key][inside]])
            assert_same_bits(*([scale[inside]] for scale in scales))
            largest_step = headroom.functional.dynamic_map(key == "exp_avg").diff().max()
            errors = (value - was[name, key]).abs()
            assert (errors <= largest_step * scales[0]).all()
            if key == "exp_avg_sq":
                assert ((value > 0) == (was[name, key] > 0)).all()
            if counts and old_ranks != ranks:
                expected.add((name, key))
                moment = moments[name, key]
                assert [moment.kept, moment.requantized] == counts, (name, key)
                assert moment.error == errors.max()
        elif not key.endswith(" scale"):
            assert_same_bits([value], [was[name, key]])
    assert moments.keys() == expected

    step(model, optimizer, 3)
    then = numbers(model, optimizer)
    for name in SHAPES:
        ours, theirs = then[name, "weight"], after[name, "weight"]
        if "adafactor" in case:  # sums in another order
            close = RESUMMED if ours.dtype == torch.float32 else dict(rtol=2**-7, atol=0)
            torch.testing.assert_close(ours, theirs, **close)
            continue
        inside = same.get(name, torch.ones(SHAPES[name], dtype=torch.bool))
        assert_same_bits([ours[inside]], [theirs[inside]])
        assert ((ours - theirs).abs() <= 0.05).all()  # 5 times lr


@pytest.mark.parametrize(
    "case, world, flatten",
    [(case, world, False) for case in CASES for world in (1, 2, 4)]
    + [(case, 4, True) for case in CASES if case.startswith("8-bit")],
)
def test_any_number_of_ranks_resumes(run, tmp_path, case, world, flatten):
    run(world, save, case, tmp_path, flatten)
    for other in {1: (2, 4), 2: (1, 2, 4), 4: (1, 2)}[world]:
        run(other, load, case, tmp_path, world)


# ---- What is refused -----------------------------------------------------------------------------


def single(mesh, placements, shape=(8, 300)):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements))
    optimizer = EIGHT(module.parameters(), min_8bit_size=0)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def write(rank, path, dims, placements):
    model, optimizer = single(init_device_mesh("cpu", dims), placements)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)


def refuse(rank, path, dims, placements, words):
    """An optimizer with states keeps them, a fresh one has none."""
    model, optimizer = single(init_device_mesh("cpu", dims), placements)
    before = [bits(t) for t in optimizer.state[model.weight].values() if not isinstance(t, DTensor)]
    before += [
        bits(t.to_local()) for t in optimizer.state[model.weight].values() if isinstance(t, DTensor)
    ]
    with pytest.raises(ValueError, match=words):
        load_sharded(path, model, optimizer)
    after = [bits(t) for t in optimizer.state[model.weight].values() if not isinstance(t, DTensor)]
    after += [
        bits(t.to_local()) for t in optimizer.state[model.weight].values() if isinstance(t, DTensor)
    ]
    assert all(map(torch.equal, before, after))
    fresh = EIGHT(model.parameters(), min_8bit_size=0)
    with pytest.raises(ValueError, match=words):
        load_sharded(path, model, fresh)
    assert not fresh.state


ROWS, COLUMNS, TWICE = (Shard(0),), (Shard(1),), (_StridedShard(0, split_factor=2), Shard(0))
REFUSED = {
    "columns": (2, (2,), COLUMNS, (2,), ROWS, "shards of dimension 1, and here .* dimension .0."),
    "onto columns": (2, (2,), ROWS, (2,), COLUMNS, "dimension 0, and here .* dimension .1."),
    "twice": (4, (4,), ROWS, (2, 2), TWICE, "several dimensions of the mesh"),
    "from twice": (4, (2, 2), TWICE, (4,), ROWS, "other shards than those of one dimension"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_shards_are_refused_by_name(run, tmp_path, case):
    ranks, dims, placements, *target, words = REFUSED[case]
    run(ranks, write, tmp_path, dims, placements)
    run(ranks, refuse, tmp_path, *target, f"'exp_avg' of 'weight' .*{words}")


def test_what_is_not_there_changes_nothing(run, tmp_path):
    run(2, save, "8-bit", tmp_path, False)
    model, optimizer = make("8-bit")
    with pytest.raises(KeyError, match="no states under 'optim'; it has .'model', 'optimizer'."):
        load_sharded(tmp_path, model, optimizer, key="optim")
    with pytest.raises(TypeError, match="wants an optimizer of headroom.optim"):
        load_sharded(tmp_path, model, torch.optim.AdamW(model.parameters()))
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(dcp.CheckpointException):
        load_sharded(tmp_path, model, optimizer)
    assert not optimizer.state


def test_a_state_dict_is_no_checkpoint():
    model, optimizer = make("8-bit")
    with pytest.raises(TypeError, match="got a state dict"):
        load_sharded(optimizer.state_dict(), model, optimizer)


def test_scales_of_other_blocks_are_refused(tmp_path):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(8, 300))
    optimizer = EIGHT(model.parameters(), min_8bit_size=0)
    state = get_optimizer_state_dict(model, optimizer)
    state["state"]["weight"]["exp_avg_absmax"] = torch.ones(11)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(
        ValueError, match=r"scales of shape \(11,\), wanted 10 for each of 1 shards"
    ):
        load_sharded(tmp_path, model, optimizer)
