"""The op headroom::muon_momentum_: the bits of torch.optim.Muon's moments, layouts of updates,
codes, registration, and what it refuses."""

import pytest
import torch
from headroom.functional import (
    dequantize_blocks,
    muon_momentum8bit_,
    muon_momentum_,
    quantize_blocks,
)

from helpers.bits import assert_same_bits
from helpers.muon import FLOATS, SHAPES, places, tensors

OP = torch.ops.headroom.muon_momentum_


def by_torch(grads, moments, momentum=0.95, nesterov=True, sign=1):
    """The moments and updates of float32, as torch.optim.Muon has them."""
    grads = [sign * grad.float() for grad in grads]
    moments = [m.float().lerp_(g, 1 - momentum) for g, m in zip(grads, moments)]
    return moments, [g.lerp(m, momentum) if nesterov else m for g, m in zip(grads, moments)]


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(
    "momentum, nesterov", [(0.95, True), (0.95, False), (0.3, True), (0, True)]
)
def test_float32_has_the_bits_of_torch(momentum, nesterov, gap, device):
    grads, moments = tensors(device=device), tensors(device=device, seed=1)
    updates, squares = places(device=device, gap=gap), torch.empty(len(SHAPES), device=device)
    options = {"momentum": momentum, "nesterov": nesterov}
    wanted, exact = by_torch(grads, moments, **options)
    muon_momentum_(grads, moments, updates, squares, **options)
    if device != "cpu" or torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert_same_bits(moments, wanted)
        assert_same_bits([u.contiguous() for u in updates], exact)
    sums = torch.stack([u.double().square().sum() for u in exact])
    torch.testing.assert_close(squares.double(), sums, rtol=2**-20, atol=0)
    assert all((u._base[:, -gap:] == 7).all() for u in updates if gap and u._base is not None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("moment_dtype", FLOATS)
def test_other_dtypes_are_rounded_once(dtype, moment_dtype, device):
    grads, moments = tensors(dtype, device), tensors(moment_dtype, device, 1)
    updates, squares = places(dtype, device, 1), torch.empty(len(SHAPES), device=device)
    scale = torch.tensor(4.0, device=device)
    wanted, exact = by_torch([g.float() / 4 for g in grads], moments, sign=-1)
    muon_momentum_(grads, moments, updates, squares, maximize=True, grad_scale=scale)
    for got, exactly in zip((*moments, *updates), (*wanted, *exact)):
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.float(), exactly, rtol=eps, atol=eps / 2**10)


@pytest.mark.parametrize("block_size", [64, 256, 512])
def test_codes_are_those_of_the_moments(block_size, device):
    kind = {"is_signed": True, "block_size": block_size}
    pairs = [quantize_blocks(t, **kind) for t in tensors(seed=1)]
    codes, scales = ([pair[i].to(device) for pair in pairs] for i in (0, 1))
    numbers = [dequantize_blocks(c, s, **kind) for c, s in zip(codes, scales)]
    grads, squares = tensors(device=device), torch.empty(2, len(SHAPES), device=device)
    both = places(device=device), places(device=device)
    muon_momentum8bit_(grads, codes, scales, both[0], squares[0], block_size=block_size)
    muon_momentum_(grads, numbers, both[1], squares[1])
    assert_same_bits([u.contiguous() for u in both[0]], [u.contiguous() for u in both[1]])
    wanted = [quantize_blocks(moment, **kind) for moment in numbers]
    assert_same_bits(codes, [pair[0] for pair in wanted])
    assert_same_bits(scales, [pair[1] for pair in wanted])


def test_found_inf_changes_nothing(device):
    lists = tensors(device=device), tensors(device=device, seed=1), places(device=device)
    squares, found = torch.ones(len(SHAPES), device=device), torch.ones((), device=device)
    before = [t.clone() for t in (*lists[1], *lists[2], squares)]
    muon_momentum_(*lists, squares, found_inf=found)
    assert_same_bits([*lists[1], *lists[2], squares], before)


def test_tensors_that_are_not_contiguous(device):
    grads, moments = tensors(device=device), tensors(device=device, seed=1)
    turned = [m.T.contiguous().T for m in moments]
    spread = [g.repeat_interleave(2, 1)[:, ::2] for g in grads]
    both, squares = (places(device=device), places(device=device)), torch.empty(5, device=device)
    muon_momentum_(grads, moments, both[0], squares)
    muon_momentum_(spread, turned, both[1], squares)
    assert_same_bits([u.contiguous() for u in both[0]], [u.contiguous() for u in both[1]])
    assert_same_bits([m.contiguous() for m in turned], moments)


def calls():
    options = {"momentum": 0.95, "nesterov": True, "maximize": False}
    squares = torch.empty(len(SHAPES))
    yield (tensors(), tensors(torch.bfloat16), [], places(torch.bfloat16), squares), options
    codes = [torch.zeros(s, dtype=torch.uint8) for s in SHAPES]
    scales = [torch.zeros(-(-c.numel() // 256)) for c in codes]
    yield (tensors(torch.bfloat16), codes, scales, places(), squares), options


def test_opcheck():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for args, options in calls():
        torch.library.opcheck(OP.default, args, options, test_utils=checks)


def test_a_compiled_call_has_the_bits_of_the_eager_one(fresh_dynamo):
    compiled = torch.compile(muon_momentum_, backend="aot_eager", fullgraph=True)
    lists = [[tensors(), tensors(seed=1), places(), torch.empty(5)] for _ in range(2)]
    muon_momentum_(*lists[0])
    compiled(*lists[1])
    assert_same_bits([*lists[0][1], lists[0][3]], [*lists[1][1], lists[1][3]])
    assert_same_bits(*([u.contiguous() for u in each[2]] for each in lists))


def bad(name, change):
    return pytest.param(change, name, id=name)


@pytest.mark.parametrize(
    "change, words",
    [
        bad("moments has 4 tensors", lambda a: a["moments"].pop()),
        bad(r"moments\[0\] has another shape", lambda a: a.update(moments=[torch.ones(2)] * 5)),
        bad("updates has 4 tensors", lambda a: a["updates"].pop()),
        bad(r"updates\[1\] has strides", lambda a: a["updates"].__setitem__(
            1, torch.zeros(10, 1200)[::2, ::2])),
        bad("has 1 dimensions, wanted 2", lambda a: [
            a[name].__setitem__(0, torch.ones(4)) for name in ("grads", "moments", "updates")]),
        bad("squares must be", lambda a: a.update(squares=torch.empty(4))),
        bad("momentum is -1", lambda a: a.update(momentum=-1.0)),
        bad("wanted uint8", lambda a: a.update(absmaxs=[torch.zeros(3) for _ in SHAPES])),
    ],
)  # fmt: skip
def test_what_it_refuses_changes_nothing(change, words):
    arguments = {"grads": tensors(), "moments": tensors(seed=1), "updates": places()}
    arguments["squares"] = torch.zeros(len(SHAPES))
    change(arguments)
    every = [t for name in ("grads", "moments", "updates") for t in arguments[name]]
    before = [t.clone() for t in every]
    with pytest.raises(RuntimeError, match=words):
        muon_momentum_(**arguments)
    assert_same_bits(every, before)


def test_no_matrices():
    assert muon_momentum_([], [], [], torch.empty(0)) is None


def test_what_requires_grad_is_refused():
    moments = list(map(torch.nn.Parameter, tensors()))
    with pytest.raises(RuntimeError, match="requires grad"):
        muon_momentum_(tensors(), moments, places(), torch.empty(5))
