"""Conversions between float32 and 16 bits: on a GPU of every number there is."""

import headroom
import pytest
import torch

from helpers.software_device import cannot_run

HALVES = [torch.bfloat16, torch.float16]


def expected(values, dtype):
    """Torch's rounding, with the one NaN that Headroom writes."""
    return torch.where(
        values.isnan(),
        torch.tensor(0x7FFF, dtype=torch.int16).to(values.device),
        values.to(dtype).view(torch.int16),
    )


def stored(values, dtype):
    param = torch.empty_like(values, dtype=dtype)
    headroom.functional.split_weights_([param], [], [values])
    return param.view(torch.int16)


def loaded(halves):
    values = torch.empty_like(halves, dtype=torch.float32)
    headroom.functional.join_weights_([values], [halves])
    return values


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_loaded(dtype, device):
    halves = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    got, wanted = loaded(halves), halves.float()
    assert torch.equal(got.isnan(), wanted.isnan())
    finite = ~wanted.isnan()
    assert torch.equal(got[finite].view(torch.int32), wanted[finite].view(torch.int32))


@pytest.mark.parametrize("dtype", HALVES)
def test_floats_around_every_half_are_stored(dtype, device):
    """For each upper half of the bits, lower halves around 0, the midpoint and the next half. Those
    of float16 lie elsewhere in float32: every thirteenth bit of the mantissa."""
    upper = torch.arange(-(2**15), 2**15, device=device, dtype=torch.int32) << 16
    around = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0xFFF, 0x1001, 0x2FFF, 0x3000, 0x3001]
    lower = torch.tensor(around, device=device, dtype=torch.int32)
    values = (upper[:, None] | lower).flatten().view(torch.float32)
    assert torch.equal(stored(values, dtype), expected(values, dtype))


@cannot_run("its kernels would take minutes for 2^32 elements")
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", HALVES)
def test_every_float_is_stored(dtype):
    step = 2**27
    for first in range(-(2**31), 2**31, step):
        bits = torch.arange(first, first + step, device="cuda", dtype=torch.int64)
        values = bits.to(torch.int32).view(torch.float32)
        assert torch.equal(stored(values, dtype), expected(values, dtype)), first
