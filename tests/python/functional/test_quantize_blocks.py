"""The ops headroom::quantize_blocks and headroom::dequantize_blocks against a search in float64."""

import headroom
import pytest
import torch
from headroom.functional import dequantize_blocks, quantize_blocks

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def data(*shape, dtype=torch.float32, is_signed=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** -(torch.arange(shape[-1]) % 12)
    return (x if is_signed else x * x).to(dtype)


def reference(values, is_signed, block_size):
    """The nearest value of the map for each element of a flat tensor, in float64."""
    table = headroom.functional.dynamic_map(is_signed).double()
    absmax = torch.stack([part.abs().max() for part in values.double().split(block_size)])
    scales = absmax.repeat_interleave(block_size)[: values.numel()]
    y = values.double() / scales.masked_fill(scales == 0, 1)
    codes = (y[:, None] - table).abs().argmin(1)
    return table[codes] * scales, absmax


@pytest.mark.parametrize("block_size", (64, 256, 4096))
@pytest.mark.parametrize("is_signed", (True, False))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nearest(dtype, is_signed, block_size, device):
    values = data(5000, dtype=dtype, is_signed=is_signed).to(device)
    codes, absmax = quantize_blocks(values, is_signed=is_signed, block_size=block_size)
    decoded = dequantize_blocks(codes, absmax, is_signed=is_signed, block_size=block_size)
    exact, scales = reference(values.cpu(), is_signed, block_size)
    assert torch.equal(absmax.cpu().double(), scales)
    ours = (decoded.cpu().double() - values.cpu().double()).abs()
    best = (exact - values.cpu().double()).abs()
    scales = scales.repeat_interleave(block_size)[:5000]
    least = headroom.functional.dynamic_map(False)[1].item() if not is_signed else 0.0
    assert (ours <= best + scales * (2.0**-23 + least)).all()
    if not is_signed:
        assert (decoded.cpu()[values.cpu() > 0] > 0).all()


def test_any_memory_order(device):
    values = data(40, 30).to(device)
    for view in (values.t(), values[:, ::2], values.unflatten(1, (5, 6)).permute(2, 0, 1)):
        codes, absmax = quantize_blocks(view, is_signed=True, block_size=64)
        dense = view.untyped_storage().nbytes() == view.numel() * 4
        assert codes.shape == view.shape
        assert codes.stride() == (view.stride() if dense else view.contiguous().stride())
        flat = values.flatten() if dense else view.flatten()
        expected = quantize_blocks(flat, is_signed=True, block_size=64)
        order = codes.as_strided((codes.numel(),), (1,))
        assert torch.equal(order, expected[0]) and torch.equal(absmax, expected[1])
        back = dequantize_blocks(codes, absmax, is_signed=True, block_size=64)
        assert back.stride() == codes.stride()
    expanded = torch.ones(1, device=device).expand(70)
    assert quantize_blocks(expanded, is_signed=False, block_size=64)[0].tolist() == [255] * 70


def test_special_values(device):
    nan, inf = float("nan"), float("inf")
    values = torch.zeros(256, device=device)
    values[0], values[64], values[128] = nan, -inf, 1e-42
    codes, absmax = quantize_blocks(values, is_signed=True, block_size=64)
    assert absmax.isnan().tolist() == [True, True, False, False]
    assert absmax.tolist()[3] == 0.0 and codes[192:].eq(127).all()
    assert codes[128] == 255
    empty = quantize_blocks(values[:0], is_signed=True)
    assert [t.numel() for t in empty] == [0, 0]
    assert dequantize_blocks(*empty, is_signed=True).numel() == 0


def test_opcheck(device):
    values = data(7, 100).to(device)
    codes, absmax = quantize_blocks(values, is_signed=True, block_size=64)
    for view in (values, values.t(), values[:, ::3]):
        torch.library.opcheck(torch.ops.headroom.quantize_blocks, (view, True, 64))
    torch.library.opcheck(torch.ops.headroom.dequantize_blocks, (codes, absmax, True, 64))


def test_compiles():
    def both(x):
        codes, absmax = quantize_blocks(x, is_signed=True)
        return dequantize_blocks(codes, absmax, is_signed=True)

    x = data(600)
    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))


def test_bad_inputs(device):
    values = data(300).to(device)
    codes, absmax = quantize_blocks(values, is_signed=True)
    refused = [
        (lambda: quantize_blocks(values, is_signed=True, block_size=100), "block_size is 100"),
        (lambda: quantize_blocks(values, is_signed=True, block_size=2**40), "block_size is"),
        (lambda: quantize_blocks(values.double(), is_signed=True), "values.* has dtype"),
        (lambda: quantize_blocks(values.requires_grad_(), is_signed=True), "no derivative"),
        (lambda: dequantize_blocks(codes.int(), absmax, is_signed=True), "codes.* has dtype"),
        (lambda: dequantize_blocks(codes, absmax[:1], is_signed=True), "numel 1, wanted 2"),
        (lambda: dequantize_blocks(codes, absmax.half(), is_signed=True), "dtype f16"),
        (lambda: dequantize_blocks(codes, absmax.expand(2, 2)[:, 0], is_signed=True), "contiguous"),
        (lambda: dequantize_blocks(codes, absmax.to("meta"), is_signed=True), "absmax"),
    ]
    for call, message in refused:
        with pytest.raises(RuntimeError, match=message):
            call()
