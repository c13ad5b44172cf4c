"""The op headroom::accumulate_: sums to the bit, compensated sums against float64, layouts."""

import math

import headroom
import pytest
import torch
from headroom._core.binaries import _C

from helpers.bits import assert_same_bits, bits
from helpers.layouts import contiguous, offset, sliced, transposed
from helpers.samples import FLOATS

SHAPES = ((37, 5), (), (1,), (0, 3), (16385,), (64,))


def lists(shapes=SHAPES, dtypes=FLOATS, device="cpu", compensated=True, seed=0):
    """(sums, losts, grads); the dtypes of the gradients take turns."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape):
        return torch.randn(shape, generator=generator).to(device)

    sums = [normal(shape) for shape in shapes]
    losts = [normal(shape) * 2**-25 for shape in shapes] if compensated else []
    grads = [normal(shape).to(dtypes[k % len(dtypes)]) for k, shape in enumerate(shapes)]
    return sums, losts, grads


def clone(columns):
    return tuple([t.clone() for t in column] for column in columns)


def run(columns, **options):
    sums, losts, grads = columns
    headroom.functional.accumulate_(sums, grads, losts=losts, **options)
    return columns


def reference(columns, factor=1.0):
    """The same in torch's float32, operation by operation."""
    sums, losts, grads = columns
    terms = [g.float() * torch.tensor(factor, dtype=torch.float32).to(g.device) for g in grads]
    if not losts:
        return [s + x for s, x in zip(sums, terms)], []
    ys = [x - c for x, c in zip(terms, losts)]
    totals = [s + y for s, y in zip(sums, ys)]
    return totals, [(t - s) - y for t, s, y in zip(totals, sums, ys)]


COMPENSATED = pytest.mark.parametrize("compensated", [False, True], ids=["plain", "compensated"])


# ---- Registration --------------------------------------------------------------------------------


@COMPENSATED
def test_opcheck(compensated, device):
    op = torch.ops.headroom.accumulate_.default
    shapes = ((3, 4), (), (0, 2), (17,))
    factor = torch.tensor(0.5, device=device)
    for options in ({}, {"factor": 0.3, "zero_grads": True}, {"factor_tensor": factor}):
        torch.library.opcheck(op, lists(shapes, device=device, compensated=compensated), options)
    turned = tuple([t.t() if t.dim() == 2 else t for t in c] for c in lists(shapes, device=device))
    torch.library.opcheck(op, turned, {"zero_grads": True})


@pytest.mark.parametrize("zero", [False, True])
def test_what_is_written_grows_a_version(zero, device):
    columns = lists(device=device)
    before = [[t._version for t in column] for column in columns]
    run(columns, zero_grads=zero)
    grown = [[t._version > v for t, v in zip(c, vs)] for c, vs in zip(columns, before)]
    count = len(SHAPES)
    assert grown == [[True] * count, [True] * count, [zero] * count]


def test_tensors_that_require_grad_are_refused():
    for column in range(3):
        columns = lists()
        columns[column][1].requires_grad_()
        kept = [bits(t).clone() for c in columns for t in c]
        with pytest.raises(RuntimeError, match="has no derivative"):
            run(columns)
        assert all(torch.equal(bits(t), k) for t, k in zip(sum(columns, []), kept))
        with torch.no_grad():
            run(columns)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@COMPENSATED
def test_compiled_whole(compensated, backend, device):
    torch._dynamo.reset()
    eager = lists(device=device, compensated=compensated)
    compiled = clone(eager)
    run(eager, factor=0.3, zero_grads=True)

    def step(columns):
        run(columns, factor=0.3, zero_grads=True)

    torch.compile(step, backend=backend, fullgraph=True)(compiled)
    for a, b in zip(eager, compiled):
        assert_same_bits(a, b)


def test_profiler_knows_the_name():
    with torch.profiler.profile() as profile:
        run(lists())
    assert "headroom::accumulate_" in {event.key for event in profile.key_averages()}


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, -7.0, 0.0])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@COMPENSATED
def test_bits_of_float32_arithmetic(compensated, as_tensor, factor, device):
    columns = lists(device=device, compensated=compensated)
    sums, losts = reference(columns, factor)
    grads = [g.clone() for g in columns[2]]
    run(columns, factor=torch.tensor([factor], device=device) if as_tensor else factor)
    assert_same_bits(columns[0], sums)
    assert_same_bits(columns[1], losts)
    assert_same_bits(columns[2], grads)


@COMPENSATED
def test_zero_grads(compensated, device):
    columns = lists(device=device, compensated=compensated)
    want = reference(columns)
    columns[2][0][0, 0] = -0.0
    columns[2][4][5] = math.nan
    want[0][4][5] = math.nan
    run(columns, zero_grads=True)
    assert_same_bits(columns[2], [torch.zeros_like(g) for g in columns[2]])
    kept = torch.arange(SHAPES[4][0], device=device) != 5
    assert_same_bits([columns[0][4][kept]], [want[0][4][kept]])
    assert columns[0][4][5].isnan()


def test_the_compensated_sum_stays_exact_over_10_000_additions(device):
    """The bound of headroom.h: 2 roundings of the sum of |x|. The plain sum is far beyond it."""
    generator = torch.Generator().manual_seed(0)
    plain, total, lost = (torch.zeros(512, device=device) for _ in range(3))
    exact, size = (torch.zeros(512, dtype=torch.float64, device=device) for _ in range(2))
    for _ in range(10_000):
        x = (torch.rand(512, generator=generator) + 0.1).to(device)
        headroom.functional.accumulate_(
            [plain, total], [x, x], losts=[torch.zeros_like(lost), lost]
        )
        exact += x.double()
        size += x.double().abs()
    error = ((total - exact).abs() / size).max().item()
    plain_error = ((plain - exact).abs() / size).max().item()
    assert error <= 2 * 2**-24
    assert plain_error > 20 * error


def test_a_sum_that_cancels(device):
    """1, then a million times 2^-25, then -1: the plain sum forgets all of them."""
    total, lost, plain = (torch.zeros(1, device=device) for _ in range(3))
    one, tiny = torch.ones(1, device=device), torch.full((1,), 2.0**-25, device=device)
    for x in (one, *[tiny] * 1000, -one):
        headroom.functional.accumulate_([total], [x], losts=[lost])
        headroom.functional.accumulate_([plain], [x])
    assert plain == 0
    assert total.item() - lost.item() == pytest.approx(1000 * 2.0**-25, rel=1e-6)


def test_no_tensors():
    assert headroom.functional.accumulate_([], []) is None


# ---- Layouts and the same bits -------------------------------------------------------------------


LAYOUTS = [contiguous, transposed, sliced, offset]


@pytest.mark.parametrize("grad", LAYOUTS)
@pytest.mark.parametrize("lost", LAYOUTS)
@pytest.mark.parametrize("total", LAYOUTS)
def test_strides_do_not_matter(total, lost, grad, device):
    columns = lists(((6, 9), (33, 66), (1, 4)), device=device)
    want = run(clone(columns), factor=0.5, zero_grads=True)
    got = tuple([f(t) for t in c] for f, c in zip((total, lost, grad), columns))
    run(got, factor=0.5, zero_grads=True)
    for a, b in zip(got, want):
        assert_same_bits(a, b)


def test_expanded_gradients_are_read(device):
    total = torch.zeros(4, 5, device=device)
    headroom.functional.accumulate_(
        [total], [torch.ones((), device=device).expand(4, 5)], factor=3.0
    )
    assert total.eq(3).all()


LARGE = ((300_000,), (7,), (150_001,), (0,), (90_000,))


@COMPENSATED
def test_same_bits_for_any_number_of_threads_and_instruction_set(compensated):
    columns = lists(LARGE, compensated=compensated)
    want = run(clone(columns), factor=1 / 3)
    torch.set_num_threads(2)
    for a, b in zip(run(clone(columns), factor=1 / 3), want):
        assert_same_bits(a, b)
    before = _C.get_cpu_level()
    try:
        for level in (level for level in _C.CpuLevel if level < before):
            _C.set_cpu_level(level)
            for a, b in zip(run(clone(columns), factor=1 / 3), want):
                assert_same_bits(a, b)
    finally:
        _C.set_cpu_level(before)


# ---- Bad inputs ----------------------------------------------------------------------------------


def put(column, k, tensor):
    return lambda columns, options: columns[column].__setitem__(k, tensor)


CASES = {
    "16-bit sum": (put(0, 5, torch.zeros(64).bfloat16()), r"sums\[5\]"),
    "16-bit rest": (put(1, 5, torch.zeros(64).half()), r"losts\[5\]"),
    "float64 gradient": (put(2, 5, torch.zeros(64).double()), r"grads\[5\]"),
    "another shape": (put(2, 5, torch.zeros(8, 8)), r"grads\[5\] .* another shape"),
    "fewer gradients": (lambda c, o: c[2].pop(), "grads has 5 tensors, but sums has 6"),
    "fewer rests": (lambda c, o: c[1].pop(), "losts has 5"),
    "expanded sum": (put(0, 5, torch.zeros(1).expand(64)), "share memory"),
    "expanded gradient to zero": (
        lambda c, o: (put(2, 5, torch.zeros(1).expand(64))(c, o), o.update(zero_grads=True)),
        "share memory",
    ),
    "factor infinite": (lambda c, o: o.update(factor=math.inf), "factor is inf"),
    "factor NaN": (lambda c, o: o.update(factor=math.nan), "factor is"),
    "two factors": (lambda c, o: o.update(factor=torch.ones(2)), "factor_tensor must be"),
}


@pytest.mark.parametrize("spoil, message", CASES.values(), ids=CASES)
def test_bad_inputs_change_no_byte(spoil, message):
    columns, options = lists(), {}
    spoil(columns, options)
    before = [bits(t).clone() for column in columns for t in column]
    with pytest.raises(RuntimeError, match=message):
        run(columns, **options)
    assert all(torch.equal(bits(t), b) for t, b in zip(sum(columns, []), before))
