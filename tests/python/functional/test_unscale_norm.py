"""The ops headroom::unscale_norm_ and headroom::grad_norm: values, flags, layouts, the same bits.

Norms are held against float64: the exact norm rounded to float32, or a neighbor of it (the
contract of headroom.h; on CUDA 4 units in the last place for p = 2).
"""

import math
from functools import partial

import headroom
import numpy as np
import pytest
import torch
from headroom._core.binaries import _C
from headroom._core.table import table_of

from helpers.bits import assert_same_bits, bits, same_bits
from helpers.layouts import offset, sliced, transposed
from helpers.samples import FLOATS

SHAPES = ((37, 5), (), (1,), (16385,), (64,))
ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf)
UNSCALE, MEASURE = headroom.functional.unscale_norm_, headroom.functional.grad_norm
OPS = pytest.mark.parametrize("op", [UNSCALE, MEASURE], ids=["unscale_norm_", "grad_norm"])
EVERY_CHECK = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def gradients(shapes=SHAPES, dtypes=FLOATS, device="cpu", seed=0):
    """Normal values; the dtypes take turns."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [g.to(device, dtypes[k % len(dtypes)]) for k, g in enumerate(values)]


def results(count, device="cpu"):
    """Outputs full of 7, so that what is not written shows."""
    full = {"norm": (), "norms": (count,), "found_inf": (1,), "clip": ()}
    out = {name: torch.full(shape, 7.0, device=device) for name, shape in full.items()}
    return out | {"culprit": torch.full((), 7, dtype=torch.int64, device=device)}


def scalar(value, device="cpu"):
    return torch.tensor(value, dtype=torch.float32, device=device)


def norm64(tensors, p):
    flat = torch.cat([t.detach().double().flatten() for t in tensors])
    return torch.linalg.vector_norm(flat, p).item() if flat.numel() else 0.0


def ulps_off(got, exact):
    exact32 = np.float32(exact)
    return abs(float(got) - exact) / float(np.spacing(exact32)) if exact32 else abs(float(got))


def limit(device, p=2.0):
    return 1 if device == "cpu" or p != 2 else 4


def scaled64(grads, factor):
    """x * factor as the op rounds it: in float32."""
    return [
        (g.float() * torch.tensor(factor, dtype=torch.float32).to(g.device)).double() for g in grads
    ]


# ---- Registration --------------------------------------------------------------------------------


def calls(device):
    grads = gradients(((3, 4), (), (0, 2), (17,)), device=device)
    yield (grads,), results(4, device)
    yield (grads,), {"norm": scalar(0.0, device)}
    more = {"grad_scale": scalar(8.0, device), "clip_coef": scalar(0.5, device)}
    yield (grads,), results(4, device) | more | {"p": 3.0, "max_norm": 1.0}
    yield ([g.t() if g.dim() == 2 else g for g in grads],), {"found_inf": scalar(0.0, device)}


@pytest.mark.parametrize("name", ["unscale_norm_", "grad_norm"])
def test_any_iterable_of_gradients_but_a_tensor(name):
    op, norm, grads = (
        getattr(headroom.functional, name),
        torch.zeros(()),
        [torch.ones(4), torch.ones(12)],
    )
    op((grad for grad in grads), norm=norm)
    assert norm == 4
    with pytest.raises(TypeError, match="grads must be a list of tensors, got a Tensor"):
        op(grads[0], norm=norm)


@pytest.mark.parametrize("name", ["unscale_norm_", "grad_norm"])
def test_opcheck(name, device):
    op = getattr(torch.ops.headroom, name).default
    for args, kwargs in calls(device):
        torch.library.opcheck(op, args, kwargs, test_utils=EVERY_CHECK)


@pytest.mark.parametrize("name", ["_unscale_norm_table_", "_grad_norm_table"])
def test_opcheck_of_tables(name, device):
    """They deal in addresses, which mean nothing for a fake tensor. Nothing traces them."""
    op = getattr(torch.ops.headroom, name).default
    for (grads,), kwargs in calls(device):
        if (table := table_of((grads,))) is not None:
            torch.library.opcheck(op, (grads[0], table), kwargs, test_utils=EVERY_CHECK[:2])


@OPS
def test_what_is_written_grows_a_version(op, device):
    grads, out = gradients(device=device), results(len(SHAPES), device)
    scale = scalar(2.0, device)
    before = [t._version for t in (*grads, *out.values(), scale)]
    op(grads, **out, grad_scale=scale)
    grown = [t._version > v for t, v in zip((*grads, *out.values(), scale), before)]
    assert grown == [op is UNSCALE] * len(grads) + [True] * len(out) + [False]


@OPS
def test_tensors_that_require_grad_are_refused(op):
    grads = gradients()
    grads[2].requires_grad_()
    norm = scalar(7.0)
    with pytest.raises(RuntimeError, match="has no derivative"):
        op(grads, norm=norm)
    assert norm == 7
    with torch.no_grad():
        op(grads, norm=norm)
    assert norm != 7


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@OPS
def test_compiled_whole(op, backend, device):
    torch._dynamo.reset()
    options = dict(p=1.0, max_norm=2.0, grad_scale=scalar(4.0, device))
    eager, compiled = gradients(device=device), gradients(device=device)
    want, got = results(len(SHAPES), device), results(len(SHAPES), device)
    op(eager, **want, **options)
    torch.compile(lambda g, o: op(g, **o, **options), backend=backend, fullgraph=True)(
        compiled, got
    )
    assert_same_bits(compiled, eager)
    assert_same_bits(got.values(), want.values())


@OPS
def test_profiler_knows_the_name(op):
    with torch.profiler.profile() as profile:
        op(gradients(), norm=scalar(0.0))
        op([torch.randn(4, 6)[:, ::2]], norm=scalar(0.0))
    names = {event.key for event in profile.key_averages()}
    assert f"headroom::{op.__name__}" in names
    assert {"headroom::_unscale_norm_table_", "headroom::_grad_norm_table"} & names


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("scale, clip", [(None, None), (1024.0, None), (3.0, 0.7), (None, 0.7)])
@OPS
def test_values_of_mixed_dtypes(op, scale, clip, p, device):
    grads, out = gradients(device=device), results(len(SHAPES), device)
    factor = np.float32(np.float64(np.float32(clip or 1)) / np.float64(scale or 1))
    want = scaled64(grads, factor)
    kept = [g.clone() for g in grads]
    scalars = {"grad_scale": scale, "clip_coef": clip}
    scalars = {name: scalar(v, device) for name, v in scalars.items() if v is not None}
    op(grads, **out, **scalars, p=p, max_norm=1.5)
    if op is UNSCALE:
        assert_same_bits(grads, [w.float().to(g.dtype) for w, g in zip(want, grads)])
    else:
        assert_same_bits(grads, kept)
    exact = norm64(want, p)
    assert ulps_off(out["norm"], exact) <= limit(device, p)
    for got, tensor in zip(out["norms"], want):
        assert ulps_off(got, norm64([tensor], p)) <= limit(device, p)
    assert out["found_inf"].item() == 7 and out["culprit"].item() == -1
    coef = min(1.0, 1.5 / (exact + 1e-6))
    assert ulps_off(out["clip"], coef) <= limit(device, p)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", ORDERS)
def test_each_dtype_alone(dtype, p, device):
    grads, out = gradients(dtypes=[dtype], device=device), results(len(SHAPES), device)
    MEASURE(grads, **out, p=p)
    assert ulps_off(out["norm"], norm64(grads, p)) <= limit(device, p)


@pytest.mark.parametrize("position", range(4))
def test_empty_tensors_at_every_position(position, device):
    grads = gradients(((40,), (3, 3), ()), device=device)
    want = results(3, device)
    MEASURE(grads, **want)
    grads.insert(position, torch.empty((2, 0), device=device, dtype=torch.bfloat16))
    got = results(4, device)
    UNSCALE(grads, **got)
    assert got["norms"][position] == 0
    rest = torch.cat([got["norms"][:position], got["norms"][position + 1 :]])
    assert_same_bits([got["norm"], rest], [want["norm"], want["norms"]])


@pytest.mark.parametrize("count", [1, 3])
def test_only_empty_tensors(count, device):
    out = results(count, device)
    UNSCALE([torch.empty(0, device=device) for _ in range(count)], **out, max_norm=1.0)
    assert out["norm"] == 0 and out["clip"] == 1 and out["culprit"] == -1
    assert out["norms"].eq(0).all() and out["found_inf"] == 7


@OPS
def test_no_gradients_write_nothing(op):
    norm = scalar(7.0)
    assert op([], norm=norm) is None and norm == 7


@pytest.mark.parametrize("big", [2.0**126, 1e38])
def test_norm_near_the_largest_float(big, device):
    """The squares are far beyond float32; the norm is not."""
    grads = [torch.full((5,), big / 4, device=device), torch.tensor([-big], device=device)]
    out = results(2, device)
    MEASURE(grads, **out, max_norm=1.0)
    exact = norm64(grads, 2)
    assert ulps_off(out["norm"], exact) <= limit(device)
    assert ulps_off(out["clip"], 1 / exact) <= limit(device)
    assert out["found_inf"] == 7


def test_a_norm_beyond_the_largest_float_still_clips(device):
    grads, out = [torch.full((400,), 3e38, device=device)], results(1, device)
    UNSCALE(grads, **out, max_norm=1e38)
    assert out["norm"] == math.inf and out["found_inf"] == 7 and out["culprit"] == -1
    assert out["clip"].item() == pytest.approx(1e38 / (3e38 * 20), rel=2**-22)


@pytest.mark.parametrize("tiny", [2.0**-149, 2.0**-140, 2.0**-126, 1e-30])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_norm_of_denormals(tiny, p, device):
    grads, out = [torch.full((100,), tiny, device=device)], results(1, device)
    MEASURE(grads, **out, p=p)
    assert ulps_off(out["norm"], norm64(grads, p)) <= limit(device, p) and out["norm"] > 0


def test_a_large_and_a_tiny_value_side_by_side(device):
    grads = [torch.tensor([1e-30, 3e37, -4e37, 1e-44] * 5, device=device)]
    out = results(1, device)
    MEASURE(grads, **out)
    assert ulps_off(out["norm"], norm64(grads, 2)) <= limit(device)


def test_precision_of_a_million_equal_values(device):
    """Summed in float32 this is wrong in the third digit."""
    grads, out = [torch.full((1_000_003,), 0.1, device=device)], results(1, device)
    for p in (1.0, 2.0):
        MEASURE(grads, **out, p=p)
        assert ulps_off(out["norm"], norm64(grads, p)) <= limit(device, p)


@pytest.mark.slow
def test_precision_of_1e8_elements(device):
    grads = [torch.randn(50_000_000, device=device) * s for s in (1.0, 1e-3)]
    out = results(2, device)
    for p in (1.0, 2.0, 3.0):
        MEASURE(grads, **out, p=p)
        assert ulps_off(out["norm"], norm64(grads, p)) <= limit(device, p)


def test_a_factor_of_one_writes_nothing(device):
    """Not even a NaN is made the usual one: a read-only page would do."""
    raw = torch.tensor([0x7FC12345, 0x3F800000, -0x80000000], dtype=torch.int32, device=device)
    grads = [raw.view(torch.float32)]
    UNSCALE(grads, clip_coef=scalar(1.0, device))
    UNSCALE(grads, norm=scalar(0.0, device), grad_scale=scalar(1.0, device))
    assert raw.tolist() == [0x7FC12345, 0x3F800000, -0x80000000]


# ---- Flags ---------------------------------------------------------------------------------------

BAD = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("p", [1.0, 2.0, 2.5, math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@OPS
def test_one_bad_element_anywhere(op, dtype, p, value, device):
    for place in (0, 7, 8, 31, 32, 999, 1000):
        grads = gradients(((20,), (1001,), (20,)), [dtype], device)
        grads[1][place] = value
        out = results(3, device)
        op(grads, **out, p=p, grad_scale=scalar(2.0, device))
        assert out["found_inf"] == 1 and out["culprit"] == 1
        assert not out["norm"].isfinite()
        assert out["norms"].isfinite().tolist() == [True, False, True]
        assert out["norm"].isnan() == math.isnan(value)


def test_the_culprit_is_the_first(device):
    grads = gradients(((20,),) * 40, device=device)
    for k in (33, 5, 17):
        grads[k][3] = math.nan
    out = results(40, device)
    MEASURE(grads, **out)
    assert out["culprit"] == 5


def test_overflow_by_the_factor_is_found(device):
    """What counts is the result: 3e38 is finite, four times that is not."""
    out = results(2, device)
    grads = [torch.ones(4, device=device), torch.full((4,), 3e38, device=device)]
    UNSCALE(grads, **out, grad_scale=scalar(0.25, device))
    assert out["found_inf"] == 1 and out["culprit"] == 1


@pytest.mark.parametrize("flag", [0.0, 1.0, -3.0])
def test_the_flag_is_shared(flag, device):
    """Finite gradients leave it alone, so that several calls can share it."""
    found = scalar(flag, device)
    MEASURE(gradients(device=device), found_inf=found)
    assert found == flag


@pytest.mark.parametrize("value", [-0.0, 1e-45, 65504.0, 3.3895e38])
def test_unusual_but_finite(value, device):
    out = results(1, device)
    MEASURE([torch.tensor([value], device=device)], **out)
    assert out["found_inf"] == 7 and out["culprit"] == -1


# ---- Layouts -------------------------------------------------------------------------------------


LAYOUTS = {
    "transposed": transposed,
    "sliced": partial(sliced, fill=math.nan),
    "unaligned": partial(offset, fill=math.nan),
    "reversed rows": lambda t: t.contiguous()[:, ::3],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@OPS
def test_strides_do_not_matter(op, dtype, layout, device):
    grads = [layout(g) for g in gradients(((6, 9), (33, 66)), [dtype], device)]
    flat = [g.clone(memory_format=torch.contiguous_format) for g in grads]
    want, got = results(2, device), results(2, device)
    scale = scalar(3.0, device)
    op(flat, **want, grad_scale=scale)
    op(grads, **got, grad_scale=scale)
    assert_same_bits(grads, flat)
    for name, value in want.items():  # another order of summing
        assert (got[name] - value).abs().max() <= 2**-23 * value.abs().max(), name


def test_expanded_gradients_are_measured_but_not_written(device):
    """As `loss = params.sum()` gives them."""
    grad, out = scalar(2.0, device).expand(10, 10), results(1, device)
    MEASURE([grad], **out)
    assert out["norm"] == 20
    with pytest.raises(RuntimeError, match=r"grads\[0\] has elements that share memory"):
        UNSCALE([grad], clip_coef=scalar(0.5, device))
    assert grad[0, 0] == 2


# ---- The same bits -------------------------------------------------------------------------------

# Enough chunks that two threads share them.
LARGE = ((300_000,), (7,), (150_001,), (0,), (90_000,))


def everything(p=2.0, level=None, threads=1):
    grads, out = gradients(LARGE), results(len(LARGE))
    before = _C.get_cpu_level()
    try:
        torch.set_num_threads(threads)
        if level is not None:
            _C.set_cpu_level(level)
        UNSCALE(grads, **out, grad_scale=scalar(3.0), max_norm=1.0, p=p)
    finally:
        _C.set_cpu_level(before)
    return [*grads, *out.values()]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_same_bits_for_any_number_of_threads(p):
    assert_same_bits(everything(p, threads=1), everything(p, threads=2))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_same_bits_on_every_instruction_set(p):
    best = everything(p)
    levels = [level for level in _C.CpuLevel if level < _C.get_cpu_level()]
    assert levels or _C.get_cpu_level() == _C.CpuLevel.BASELINE
    for level in levels:
        assert_same_bits(everything(p, level), best)


# ---- Bad inputs ----------------------------------------------------------------------------------

CASES = {
    "float64 gradient": (lambda g, o: g.__setitem__(4, torch.ones(3).double()), r"grads\[4\]"),
    "integer gradient": (
        lambda g, o: g.__setitem__(4, torch.ones(3).int()),
        r"grads\[4\] has dtype Int",
    ),
    "meta gradient": (
        lambda g, o: g.__setitem__(4, torch.ones(3, device="meta")),
        r"meta|grads\[4\]",
    ),
    "norms of another length": (lambda g, o: o.update(norms=torch.zeros(4)), "norms must be"),
    "norms with gaps": (lambda g, o: o.update(norms=torch.zeros(10)[::2]), "contiguous"),
    "norm in float64": (
        lambda g, o: o.update(norm=torch.zeros((), dtype=torch.float64)),
        "norm must",
    ),
    "culprit in int32": (
        lambda g, o: o.update(culprit=torch.zeros((), dtype=torch.int32)),
        "culprit",
    ),
    "two grad_scales": (lambda g, o: o.update(grad_scale=torch.ones(2)), "grad_scale must be"),
    "grad_scale 0": (lambda g, o: o.update(grad_scale=scalar(0.0)), "finite number > 0"),
    "grad_scale NaN": (lambda g, o: o.update(grad_scale=scalar(math.nan)), "finite number > 0"),
    "p 0": (lambda g, o: o.update(p=0.0), "p is 0"),
    "p NaN": (lambda g, o: o.update(p=math.nan), "p is"),
    "max_norm < 0": (lambda g, o: o.update(max_norm=-1.0), "max_norm is -1"),
}


@pytest.mark.parametrize("spoil, message", CASES.values(), ids=CASES)
@OPS
def test_bad_inputs_change_no_byte(op, spoil, message):
    grads = gradients()
    options = results(len(SHAPES)) | {"grad_scale": scalar(2.0), "p": 2.0, "max_norm": 1.0}
    spoil(grads, options)
    tensors = [
        t for t in (*grads, *options.values()) if isinstance(t, torch.Tensor) and not t.is_meta
    ]
    before = [bits(t).clone() for t in tensors]
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        op(grads, **options)
    assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before))


def test_the_fake_refuses_what_the_op_refuses():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        MEASURE([torch.ones(3)], norm=torch.zeros(()))
        for spoiled in ({"norm": torch.zeros(2)}, {"culprit": torch.zeros(())}):
            with pytest.raises(RuntimeError, match="must be a"):
                MEASURE([torch.ones(3)], **spoiled)
        with pytest.raises(RuntimeError, match="has dtype"):
            MEASURE([torch.ones(3).double()], norm=torch.zeros(()))


def test_unscaling_is_as_torch_does_it(device):
    """The scaler's own op, on float32: the same bits and the same flag."""
    for bad in (None, math.inf, math.nan):
        ours = gradients(dtypes=[torch.float32], device=device)
        if bad is not None:
            ours[3][100] = bad
        theirs = [g.clone() for g in ours]
        flags = [scalar(0.0, device) for _ in range(2)]
        inverse = scalar(1 / 3, device)
        UNSCALE(ours, found_inf=flags[0], clip_coef=inverse)
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, flags[1], inverse)
        assert flags[0] == flags[1]
        for a, b in zip(ours, theirs):
            assert same_bits(a.nan_to_num(nan=5.0), b.nan_to_num(nan=5.0))
            assert torch.equal(a.isnan(), b.isnan())
