"""Muon's parts of packed matrices that take turns, as queries, keys and values head after head, and
gates and ups that alternate: as parameters that were cut by hand."""

import io
import itertools

import pytest
import torch
from headroom.optim import Muon, Muon8bit
from headroom.optim.muon.matrices import Lines
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.mesh import mesh, whole
from helpers.ranks import Ranks

BOTH = pytest.mark.parametrize("cls", [Muon, Muon8bit])
EXACT = {"ns_dtype": "float32", "lr": 0.1}
# Shapes, splits, and the dimension that is split.
CASES = {
    "by head": ((96, 64), (4, (8, 8, 8)), 0),
    "of several sizes": ((64, 128), (2, (16, 12, 4)), 0),
    "alternating rows": ((48, 64), (24, (1, 1)), 0),
    "alternating columns": ((32, 96), (48, (1, 1)), 1),
    "columns by head": ((32, 96), (6, (10, 6)), 1),
    "a stack": ((2, 96, 64), (4, (8, 8, 8)), 0),
    "a transposed stack": ((3, 32, 96), (48, (1, 1)), 1),
}
EVERY = pytest.mark.parametrize("case", CASES)


def cut(tensor, split, dim):
    """Returns the parts of every matrix of a tensor, by the numbers of their rows or columns."""
    times, sizes = split
    matrices = tensor.unbind(0) if tensor.dim() == 3 else [tensor]
    numbers = torch.arange(matrices[0].shape[dim]).view(times, sum(sizes)).split(list(sizes), 1)
    return [one.index_select(dim, each.flatten()) for one in matrices for each in numbers]


def options_of(cls):
    return EXACT | ({"min_8bit_size": 0, "block_size": 64} if cls is Muon8bit else {})


def drawn(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@BOTH
@EVERY
@pytest.mark.parametrize("normuon, master", [(None, None), (0.5, None), (0.5, "remainder16")])
def test_steps_are_those_of_parts_that_are_parameters(cls, case, normuon, master):
    """Weights, moments, codes and their scales, means of rows, and the rest of weights."""
    shape, split, dim = CASES[case]
    dtype = torch.float32 if master is None else torch.bfloat16
    packed = nn.Parameter(drawn(shape, 1, dtype))
    parts = [nn.Parameter(part) for part in cut(packed.detach(), split, dim)]
    own = options_of(cls) | {"normuon": normuon, "master": master}
    together = cls([{"params": [packed], "split": split, "use_muon": True}], **own)
    # Codes are of blocks of columns, which parts of columns do not have: moments are in float32.
    by_rows = cls if dim == 0 else Muon
    if by_rows is not cls:
        own = EXACT | {"normuon": normuon, "master": master, "state_dtype": torch.float32}
    apart = by_rows(parts, **own)
    before = packed.detach().clone()
    for step in range(3):
        packed.grad = drawn(shape, 100 + step, dtype)
        for part, grad in zip(parts, cut(packed.grad, split, dim)):
            part.grad = grad
        together.step()
        apart.step()
    close = {"rtol": 1e-4, "atol": 2e-5} if master is None else {"rtol": 2**-8, "atol": 1e-6}
    assert (packed != before).float().mean() > 0.9
    for part, one in zip(parts, cut(packed.detach(), split, dim), strict=True):
        torch.testing.assert_close(one, part.detach(), **close)
    state, first = together.state[packed], apart.state[parts[0]]
    assert set(state) == set(first)
    assert ("momentum_buffer_absmax" in state) is (cls is Muon8bit and dim == 0)
    for name in state.keys() - {"row_var", "momentum_buffer_absmax", "step"}:
        pieces = cut(state[name], split, dim)
        for part, piece in zip(parts, pieces, strict=True):
            theirs = apart.state[part][name]
            if name == "momentum_buffer":
                assert torch.equal(piece, theirs)
            else:
                assert (piece != theirs).float().mean() < 0.02  # the rounding of products
    if normuon is not None and dim == 0:
        rows = state["row_var"].unsqueeze(-1)
        for part, piece in zip(parts, cut(rows, split, 0), strict=True):
            torch.testing.assert_close(piece[:, 0], apart.state[part]["row_var"])
    elif normuon is not None:
        theirs = torch.cat([apart.state[part]["row_var"] for part in parts])
        torch.testing.assert_close(state["row_var"].flatten(), theirs)


@BOTH
def test_one_step_goes_along_the_exact_polar_factors(cls):
    """Of the parts of the gradient, in float64, with the learning rate of their shapes."""
    shape, split, dim = CASES["by head"]
    packed = nn.Parameter(drawn(shape, 1))
    iterations = [(3.4445, -4.7750, 2.0315)] * 5 + [(1.875, -1.25, 0.375)] * 7
    own = options_of(cls) | {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "ns_steps": 12}
    own |= {"ns_coefficients": iterations, "adjust_lr_fn": "spectral_unclamped"}
    optimizer = cls([("qkv", packed)], split={"qkv": split}, **own)
    before, packed.grad = packed.detach().clone(), drawn(shape, 2)
    optimizer.step()
    moved = cut(before - packed.detach(), split, dim)
    for one, grad in zip(moved, cut(packed.grad, split, dim), strict=True):
        left, _, right = torch.linalg.svd(grad.double(), full_matrices=False)
        wanted = (32 / 64) ** 0.5 * left @ right
        torch.testing.assert_close(one.double(), wanted, rtol=0, atol=2e-4)


@BOTH
@EVERY
def test_random_rounding_is_that_of_the_whole(cls, case):
    """By the place of an element: without gradients weights decay, and parts make no difference."""
    shape, split, _ = CASES[case]
    weights = []
    for parts in (None, split):
        packed = nn.Parameter(drawn(shape, 1, torch.bfloat16))
        packed.grad = torch.zeros_like(packed)
        own = options_of(cls) | {"rounding": "stochastic", "weight_decay": 0.013}
        cls([{"params": [packed], "split": parts, "use_muon": True}], **own).step()
        weights.append(packed)
    assert torch.equal(*weights)
    nearest = (drawn(shape, 1, torch.bfloat16).float() * (1 - 0.1 * 0.013)).bfloat16()
    assert not torch.equal(weights[0], nearest)


@BOTH
def test_a_loaded_state_goes_on(cls):
    """Also with parts that were lists in a file."""
    (shape, split, _), others = CASES["by head"], {"split": [4, [8, 8, 8]], "use_muon": True}
    packed = nn.Parameter(drawn(shape, 1))
    own = options_of(cls) | {"normuon": 0.5}
    optimizer = cls([{"params": [packed]} | others], **own)
    assert optimizer.param_groups[0]["split"] == split
    packed.grad = drawn(shape, 2)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = nn.Parameter(packed.detach().clone())
    resumed = cls([{"params": [again]}], **own)  # without parts, which are the file's
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.param_groups[0]["split"] == split
    packed.grad, again.grad = drawn(shape, 3), drawn(shape, 3)
    optimizer.step()
    resumed.step()
    assert torch.equal(packed, again)


WANTED = "is wanted as a number of parts, their sizes, or"


@pytest.mark.parametrize(
    "split, words",
    [
        ((5, (1, 1)), r"split=\(5, \(1, 1\)\) adds up to 10, neither the 96 rows nor the 64"),
        ((0, (1, 1)), WANTED),
        ((4, ()), WANTED),
        (((1, 1), 48), WANTED),
        ((48, (2, 0)), WANTED),
        ((24.0, (2, 2)), WANTED),
    ],
    ids=str,
)
def test_turns_that_do_not_fit_are_refused(split, words):
    with pytest.raises(ValueError, match=words):
        Muon([("qkv", nn.Parameter(drawn((96, 64), 1)))], split={"qkv": split})


def test_lines_of_any_range():
    """Cut at its ends: the same lines in the same order, in three pieces at most."""
    for lines in (Lines(3, 5), Lines(2, 3, 4, 7), Lines(0, 1, 9, 2), Lines(4, 4, 3, 6)):
        numbers = torch.arange(40)
        own = lines.of(numbers, 0).flatten().tolist()
        assert len(own) == lines.total
        for first, size in itertools.product(range(36), range(5 * 7)):
            here, found = numbers[first : first + size], []
            pieces = lines.within(first, len(here))
            assert len(pieces) <= 3
            for piece, begin in pieces:
                found += piece.of(here, 0).flatten().tolist()
                assert own[begin : begin + piece.total] == found[-piece.total :]
            assert found == [number for number in own if first <= number < first + size]


# ---- shards --------------------------------------------------------------------------------------


class Model(nn.ModuleDict):
    def forward(self):
        raise NotImplementedError  # fully_shard() wants one; gradients are set


SPLITS = {
    "by_head": (4, (4, 4, 4)),
    "uneven": (3, (5, 6, 3)),  # whose runs are cut by the ends of shards
    "rows": (13, (1, 1)),
    "columns": (32, (1, 1)),
    "experts": (16, (1, 1)),
}


def make(dtype=torch.float32):
    torch.manual_seed(3)
    sizes = {"by_head": (64, 48), "uneven": (64, 42), "rows": (64, 26), "columns": (64, 20)}
    model = Model({name: nn.Linear(*each, bias=False) for name, each in sizes.items()})
    model.register_parameter("experts", nn.Parameter(torch.randn(4, 16, 32)))
    return model.to(dtype)


def spread(value, param):
    return distribute_tensor(value.to(param.dtype), param.device_mesh, param.placements)


def train(cls, model, is_sharded, factor=1.0, **options):
    optimizer = cls(model, split=SPLITS, workspace=20_000, **options_of(cls), **options)
    for step in range(3):
        for seed, param in enumerate(model.parameters()):
            grad = drawn(param.shape, 10 * step + seed) * factor
            param.grad = spread(grad, param) if is_sharded else grad.to(param.dtype)
        optimizer.step()
    return optimizer


def sharded(rank, cls, normuon):
    single, model, before = make(), make(), make()
    fully_shard(model, mesh=mesh())
    one = train(cls, single, False, normuon=normuon)
    several = train(cls, model, True, normuon=normuon)
    params = whole(model.parameters())
    for param, want, first in zip(params, single.parameters(), before.parameters()):
        torch.testing.assert_close(param, want, rtol=1e-3, atol=2e-4)
        assert (param - first).abs().mean() > 0.01
    for param, other in zip(model.parameters(), single.parameters()):
        state, want = several.state[param], one.state[other]
        for name in {"momentum_buffer", "row_var"} & want.keys():
            if state[name].dtype == want[name].dtype:  # in the order of the parameter
                torch.testing.assert_close(
                    state[name].full_tensor(), want[name], rtol=1e-3, atol=1e-5
                )


@pytest.mark.gloo
@pytest.mark.parametrize("cls, normuon", [(Muon, None), (Muon, 0.6), (Muon8bit, None)])
def test_fsdp2_gives_the_weights_of_one_rank(ranks, cls, normuon):
    ranks(sharded, cls, normuon)


def rounded(rank):
    single, model = make(torch.bfloat16), make(torch.bfloat16)
    fully_shard(model, mesh=mesh())
    own = {"rounding": "stochastic", "weight_decay": 0.013, "factor": 0.0}
    train(Muon, single, False, **own)
    train(Muon, model, True, **own)
    for param, want in zip(whole(model.parameters()), single.parameters()):
        assert torch.equal(param, want)


@pytest.mark.gloo
def test_random_rounding_of_shards_is_that_of_the_whole(ranks):
    ranks(rounded)


def gathered(rank):
    """Rows of stacks, and what is sharded by columns, which parts refuse."""
    value, grad, split = drawn((3, 24, 16), 1), drawn((3, 24, 16), 2), (4, (2, 3, 1))
    params = [nn.Parameter(value.clone())]
    params += [nn.Parameter(distribute_tensor(value, mesh(), [Shard(1)]))]
    for param in params:
        param.grad = spread(grad, param) if param is params[1] else grad
        Muon([{"params": [param], "split": split, "use_muon": True}], **EXACT).step()
    torch.testing.assert_close(params[1].full_tensor(), params[0], rtol=1e-3, atol=1e-5)
    assert (params[0] - value).abs().mean() > 0.01
    columns = nn.Parameter(distribute_tensor(drawn((24, 16), 1), mesh(), [Shard(1)]))
    columns.grad = spread(drawn((24, 16), 2), columns)
    with pytest.raises(NotImplementedError, match="matrices that are split may be sharded by rows"):
        Muon([{"params": [columns], "split": split, "use_muon": True}]).step()


@pytest.mark.gloo
def test_stacks_whose_rows_are_sharded(ranks):
    ranks(gathered)


@pytest.mark.slow
@pytest.mark.gloo
def test_four_ranks():
    four = Ranks(4)
    try:
        four(sharded, Muon, 0.6)
        four(rounded)
    finally:
        four.close()
