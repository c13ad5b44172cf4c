"""Matrices in MXFP4, as gpt-oss stores them: against transformers, and their formula in float64."""

import dataclasses

import pytest
import torch
from headroom.functional import (
    QuantizedMatrix,
    dequantize_matrix,
    linear,
    linear_quantized,
    lora_linear,
    mxfp4_matrix,
    quantize_matrix,
)

U8, F32, BF16, F16 = torch.uint8, torch.float32, torch.bfloat16, torch.float16
VALUES = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]


def stored(*shape, least=0, most=255, seed=0):
    """Blocks and scales of a matrix or a stack of this shape."""
    *rows, cols = shape
    rng = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*rows, cols // 32, 16), dtype=U8, generator=rng)
    scales = torch.randint(least, most + 1, (*rows, cols // 32), dtype=U8, generator=rng)
    return blocks, scales


def expected(blocks, scales, dtype):
    values = torch.tensor(VALUES + [-value for value in VALUES], dtype=torch.float64)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    powers = torch.exp2(scales.double() - 127)
    powers[scales == 255] = torch.nan
    exact = values[codes.long()] * powers[..., None]
    return exact.flatten(-2).to(F32).to(dtype)


def equal(a, b):
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(kind), b.masked_fill(nan, 0).view(kind)
    )


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
def test_every_code_and_exponent(dtype, device):
    scales = torch.arange(256, dtype=U8)[:, None]
    both = torch.arange(16, dtype=U8)
    blocks = (both | both.flip(0) << 4).expand(256, 1, 16)
    for rows in (256, 255, 1):
        q = mxfp4_matrix(blocks[:rows].to(device), scales[:rows].to(device), dtype)
        got = dequantize_matrix(q).cpu()
        assert got.dtype == dtype and equal(got, expected(blocks[:rows], scales[:rows], dtype))
    assert got.shape == (1, 32)


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
def test_decodes_as_transformers_does(dtype, device):
    """Every code with every exponent but 255, of which it makes 2^128, in a stack such as those of
    gpt-oss, which it transposes."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    both, scales = torch.arange(16, dtype=U8), torch.arange(255, dtype=U8).view(5, 17, 3)
    blocks = (both | both.flip(0) << 4).expand(5, 17, 3, 16)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    q = mxfp4_matrix(blocks.to(device), scales.to(device))
    assert q.shape == (5, 17, 96) and q.dtype == BF16
    ours = dequantize_matrix(q, dtype)
    assert equal(ours.cpu(), theirs.transpose(1, 2).contiguous())


def test_shares_the_memory_of_a_checkpoint(device):
    blocks, scales = (t.to(device) for t in stored(4, 6, 64))
    q = mxfp4_matrix(blocks, scales)
    assert q.codes is blocks and q.scales is scales
    assert (q.format, q.block_size, q.nested) == ("mxfp4", 32, False)
    one = mxfp4_matrix(blocks[1], scales[1])
    assert one.shape == (6, 64) and one.codes.data_ptr() == blocks[1].data_ptr()
    assert equal(dequantize_matrix(one).cpu(), dequantize_matrix(q)[1].cpu())
    bits = 8 * (q.codes.nbytes + q.scales.nbytes) / (4 * 6 * 64)
    assert bits == 4.25


def test_any_memory(device):
    """Bytes at any address, and views."""
    blocks, scales = (t.to(device) for t in stored(5, 64, seed=1))
    q = mxfp4_matrix(blocks, scales)
    wanted = dequantize_matrix(q).cpu()
    shifted = dataclasses.replace(
        q,
        codes=torch.cat((blocks.flatten()[:1], blocks.flatten()))[1:],
        scales=torch.cat((scales.flatten()[:1], scales.flatten()))[1:],
    )
    assert equal(dequantize_matrix(shifted).cpu(), wanted)
    views = torch.stack((blocks, blocks), 3)[..., 0], torch.stack((scales, scales), 2)[..., 0]
    assert equal(dequantize_matrix(mxfp4_matrix(*views)).cpu(), wanted)
    assert dequantize_matrix(mxfp4_matrix(blocks[:0], scales[:0])).shape == (0, 64)


@pytest.mark.parametrize("rows", (3, 40))
def test_linear_layers(rows, device):
    """Of the decoded matrix. Few rows take the same way as many."""
    blocks, scales = stored(48, 96, least=118, most=124)
    q = mxfp4_matrix(blocks.to(device), scales.to(device), F32)
    weight = expected(blocks, scales, F32).to(device)
    rng = torch.Generator().manual_seed(2)
    x, dy, a, b = (
        torch.randn(shape, generator=rng).to(device)
        for shape in ((rows, 96), (rows, 48), (4, 96), (48, 4))
    )
    for call, plain in (
        (lambda x: linear_quantized(x, q), lambda x: linear(x, weight)),
        (
            lambda x: lora_linear(x, q, None, a, b, scale=0.5),
            lambda x: lora_linear(x, weight, None, a, b, scale=0.5),
        ),
    ):
        results = []
        for forward in (call, plain):
            leaf = x.clone().requires_grad_()
            y = forward(leaf)
            results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
        for ours, wanted in zip(*results):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-4)


def test_opcheck(device):
    blocks, scales = (t.to(device) for t in stored(7, 96, most=200))  # it compares NaN
    torch.library.opcheck(
        torch.ops.headroom.dequantize_matrix, (blocks, scales, 7, 96, 4, 32, False, BF16)
    )


def test_compiles():
    q = mxfp4_matrix(*stored(2, 6, 96))
    compiled = torch.compile(dequantize_matrix, fullgraph=True, backend="aot_eager")
    assert equal(compiled(q), dequantize_matrix(q))


def test_bad_inputs(device):
    blocks, scales = (t.to(device) for t in stored(6, 96))
    q = mxfp4_matrix(blocks, scales)
    before = blocks.clone(), scales.clone()
    op = torch.ops.headroom.dequantize_matrix
    for call, message in (
        (lambda: op(blocks, scales, 6, 96, 4, 64, False, BF16), "block_size is 64 and a row has"),
        (lambda: op(blocks, scales, 9, 64, 4, 32, True, BF16), "nested is true"),
        (lambda: op(blocks, scales, 16, 36, 4, 32, False, BF16), "a row has 36 elements"),
        (lambda: op(blocks, scales, 5, 96, 4, 32, False, BF16), "codes has 288 .* wanted 240"),
        (lambda: op(blocks, scales[:5], 6, 96, 4, 32, False, BF16), "scales has 15 .* wanted 18"),
        (lambda: op(blocks, scales.view(torch.int8), 6, 96, 4, 32, False, BF16), "scales has 18"),
        (
            lambda: torch.ops.headroom.quantize_matrix(
                torch.ones(6, 96, device=device), 4, 32, False, False
            ),
            "HR_MXFP4 .4., which is only read",
        ),
        (lambda: dequantize_matrix(dataclasses.replace(q, format="nf4")), "scales has 18"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    for call, message in (
        (lambda: quantize_matrix(torch.ones(6, 96), "mxfp4"), "to is 'mxfp4', which is only read"),
        (lambda: mxfp4_matrix(blocks.float(), scales), "blocks are torch.float32 and scales"),
        (lambda: mxfp4_matrix(blocks, scales.view(torch.int8)), "wanted uint8"),
        (lambda: mxfp4_matrix(blocks[:5], scales), r"\[5, 3, 16\] and scales \[6, 3\], wanted"),
        (lambda: mxfp4_matrix(blocks[0], scales[0]), r"scales \[3\], wanted"),
        (lambda: mxfp4_matrix(blocks.flatten(1), scales), r"blocks have shape \[6, 48\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="scales"):
        mxfp4_matrix(blocks, None)
    assert torch.equal(blocks, before[0]) and torch.equal(scales, before[1])
    assert isinstance(q, QuantizedMatrix)
