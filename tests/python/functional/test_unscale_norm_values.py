"""What headroom::unscale_norm_ and headroom::grad_norm compute: norms and flags of any values, with
the same bits on any threads.

Norms are held against float64: the exact norm rounded to float32, or a neighbor of it (the
contract of headroom.h; on CUDA 4 units in the last place for p = 2).
"""

import math

import numpy as np
import pytest
import torch
from headroom._core.binaries import _C

from helpers.bits import assert_same_bits, same_bits
from helpers.gradient_norms import (
    MEASURE,
    OPS,
    SHAPES,
    UNSCALE,
    gradients,
    limit,
    norm64,
    results,
    ulps_off,
)
from helpers.samples import FLOATS, scalar

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf)


def scaled64(grads, factor):
    """x * factor as the op rounds it: in float32."""
    return [
        (g.float() * torch.tensor(factor, dtype=torch.float32).to(g.device)).double() for g in grads
    ]


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
