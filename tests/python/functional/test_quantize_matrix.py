"""The ops headroom::quantize_matrix and headroom::dequantize_matrix against bitsandbytes and
float64."""

import dataclasses

import headroom
import pytest
import torch
from headroom.functional import QuantizedMatrix, dequantize_matrix, quantize_matrix
from headroom.functional.quantize_matrix import FORMATS

F32 = torch.float32
FLOATS = (F32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.fixture(scope="module")
def bnb():
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.functional as module

    return module


def data(*shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantize(x, to="nf4", block_size=64, double=False, **options):
    return quantize_matrix(x, to, block_size=block_size, double=double, **options)


def absmax_of(q):
    """The scales as the kernels see them, float32, in two roundings."""
    if not q.nested:
        return q.scales.view(F32)
    blocks = -(-q.shape[0] * q.shape[1] // q.block_size)
    rest = q.scales[-(-blocks // 4) * 4 :].view(F32)
    map_ = headroom.functional.dynamic_map(True).to(q.scales.device)
    values = map_[q.scales[:blocks].long()]
    return values * rest[:-1].repeat_interleave(256)[:blocks] + rest[-1]


def codes_of(q):
    codes = torch.stack((q.codes.flatten() >> 4, q.codes.flatten() & 15), 1)
    return codes.flatten()[: q.shape[0] * q.shape[1]]


def table_of(bnb, to):
    return bnb.get_4bit_type(to, device="cpu")


def expected(bnb, q, dtype):
    """What bitsandbytes' own torch code decodes."""
    scales = absmax_of(q).cpu().repeat_interleave(q.block_size)[: q.shape[0] * q.shape[1]]
    values = table_of(bnb, q.format)[codes_of(q).cpu().long()]
    return (values * scales).view(q.shape).to(dtype)


# ---- bitsandbytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("to", ("nf4", "fp4"))
def test_codes_and_scales_of_bitsandbytes(to, block_size, dtype, device, bnb):
    apart = 0
    for shape in ((1, 1), (3, 5), (64, 64), (7, 100), (33, 131), (2, 8192), (16, 1000)):
        x = data(*shape, dtype=dtype, seed=block_size)
        q = quantize(x.to(device), to, block_size)
        codes, state = bnb.quantize_4bit(x, blocksize=block_size, quant_type=to)
        assert torch.equal(q.scales.cpu().view(F32), state.absmax)
        assert q.codes.shape == codes.shape and q.codes.dtype == codes.dtype
        full = x.numel() // block_size * block_size // 2
        assert torch.equal(q.codes[:full].cpu(), codes[:full])
        # It divides in a short block, where we multiply: a last place may differ.
        apart += (q.codes[full:].cpu() != codes[full:]).sum().item()
    assert apart <= 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block_size", (32, 64, 4096))
@pytest.mark.parametrize("to", ("nf4", "fp4"))
def test_elements_of_bitsandbytes(to, block_size, dtype, device, bnb):
    for shape in ((1, 1), (5, 33), (64, 64), (7, 100), (300, 129)):
        for double in (False, True):
            q = quantize(data(*shape, dtype=dtype).to(device), to, block_size, double)
            got = dequantize_matrix(q)
            assert got.dtype == dtype
            assert torch.equal(got.cpu(), expected(bnb, q, dtype))
            assert torch.equal(dequantize_matrix(q, F32).cpu(), expected(bnb, q, F32))


def read(codes, state, shape, dtype):
    """A state of bitsandbytes as our matrix."""
    parts, nested = [state.absmax], state.nested
    if nested:
        padding = torch.zeros(-state.absmax.numel() % 4, dtype=torch.uint8)
        parts += [padding, state.state2.absmax, state.offset.view(1)]
    scales = torch.cat([part.view(torch.uint8) for part in parts])
    return QuantizedMatrix(codes, scales, shape, dtype, state.quant_type, state.blocksize, nested)


@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("to", ("nf4", "fp4"))
def test_states_of_bitsandbytes_are_read(to, nested, device, bnb):
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as plain

    plain = getattr(plain, "__wrapped__", plain)
    for shape in ((64, 64), (7, 100), (40, 4304), (3, 5)):
        x = data(*shape, dtype=torch.bfloat16)
        codes, state = bnb.quantize_4bit(x, blocksize=64, quant_type=to, compress_statistics=nested)
        absmax = state.absmax
        if nested:
            absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
        theirs = plain(codes.flatten(), absmax, state.code, 64, shape, x.dtype)
        q = read(codes, state, shape, x.dtype)
        q = dataclasses.replace(q, codes=q.codes.to(device), scales=q.scales.to(device))
        assert torch.equal(dequantize_matrix(q).cpu(), theirs)


def test_bitsandbytes_takes_the_wrong_scales_where_blocks_cross_rows(bnb):
    """Its AVX-512 loop counts blocks per row. Ours counts them through the matrix, as its other
    loops and its quantizer do."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("the loop needs AVX-512")
    x = data(40, 4304)
    codes, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")
    theirs = bnb.dequantize_4bit(codes, state)
    ours = dequantize_matrix(read(codes, state, x.shape, F32))
    limit = 0.16 * state.absmax.repeat_interleave(64)[: x.numel()].view(x.shape)
    assert ((ours - x).abs() <= limit).all()
    assert ((theirs - x).abs() > limit).any()


def test_matrices_of_ours_are_read_by_bitsandbytes(device, bnb):
    x = data(64, 128, dtype=torch.bfloat16)
    for options in ({}, {"search": True}, {"to": "fp4"}):
        q = quantize_matrix(x.to(device), double=False, **options)
        state = bnb.QuantState(
            absmax=q.scales.cpu().view(F32),
            shape=x.shape,
            dtype=x.dtype,
            blocksize=64,
            code=table_of(bnb, q.format),
            quant_type=q.format,
        )
        assert torch.equal(bnb.dequantize_4bit(q.codes.cpu(), state), dequantize_matrix(q).cpu())


def test_int8_rows_of_bitsandbytes(device, bnb):
    for shape in ((5, 7), (1, 1), (33, 260), (4, 5000)):
        x = data(*shape, dtype=torch.float16)
        codes, scales, _ = bnb.int8_vectorwise_quant(x)
        q = quantize_matrix(x.to(device), "int8")
        assert torch.equal(q.codes.cpu(), codes) and torch.equal(q.scales.cpu().view(F32), scales)
        assert torch.equal(
            dequantize_matrix(q, F32).cpu(), bnb.int8_vectorwise_dequant(codes, scales)
        )
        assert not q.nested and dequantize_matrix(q).dtype == x.dtype


# ---- What is ours --------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_error_in_float64(to, device):
    """What quantizing normal numbers costs, as published for the formats."""
    x = data(256, 512)
    limits = {"nf4": 0.0088, "fp4": 0.0155, "int8": 8e-5}
    plain = ((dequantize_matrix(quantize(x.to(device), to)).cpu().double() - x) ** 2).mean()
    assert 0.5 * limits[to] < plain < limits[to]
    q = quantize_matrix(x.to(device), to)
    assert ((dequantize_matrix(q).cpu().double() - x) ** 2).mean() < 1.01 * plain
    bits = 8 * (q.codes.nbytes + q.scales.nbytes) / x.numel()
    assert bits == pytest.approx(8.0625 if to == "int8" else 4.127, abs=1e-3)


@pytest.mark.parametrize("to", ("nf4", "fp4"))
def test_search_lowers_the_error(to, device):
    x = data(1024, 1024).to(device)
    errors = [
        (dequantize_matrix(quantize(x, to, search=search)).double() - x.double()).square().mean()
        for search in (False, True)
    ]
    assert errors[1] <= 0.88 * errors[0]


def test_nested_scales_are_near(device):
    for block_size in (32, 64, 256):
        x = data(300, 520).to(device)
        plain, nested = (quantize(x, block_size=block_size, double=d) for d in (False, True))
        assert torch.equal(plain.codes, nested.codes)
        exact, near = absmax_of(plain), absmax_of(nested)
        assert (near - exact).abs().max() < 0.02 * exact.max()
        blocks = exact.numel()
        assert nested.scales[blocks : -(-blocks // 4) * 4].eq(0).all()
        offset = nested.scales[-4:].view(F32).item()
        assert offset == pytest.approx(exact.double().mean().item(), rel=1e-7)


@pytest.mark.parametrize("to", FORMATS)
def test_any_memory(to, device):
    """Views are read as they are, and bytes at any address."""
    x = data(40, 96).to(device)
    wide = torch.cat((x, x), 1)
    views = (wide[:, :96], x.t().contiguous().t(), torch.stack((x, x), 2)[..., 0], x)
    expected = quantize_matrix(x, to)
    for view in views:
        q = quantize_matrix(view, to)
        assert torch.equal(q.codes, expected.codes) and torch.equal(q.scales, expected.scales)
    shifted = dataclasses.replace(
        expected,
        codes=torch.cat((expected.codes[:1], expected.codes))[1:].clone().flatten(),
        scales=torch.cat((expected.scales[:1], expected.scales))[1:],
    )
    assert torch.equal(dequantize_matrix(shifted), dequantize_matrix(expected))


def test_special_values(device):
    x = torch.zeros(4, 64, device=device)
    x[1, 3], x[2, 5], x[3, 0] = float("nan"), float("inf"), 1e-42
    out = dequantize_matrix(quantize(x))
    assert out[0].eq(0).all() and not out[0].signbit().any()
    assert out[1].isnan().all()
    assert out[2, 5] == float("inf") and out[2].isnan().sum() == 63
    assert out[3, 0] == x[3, 0] and out[3, 1:].eq(0).all()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("shape", ((0, 5), (5, 0), (0, 0)))
def test_nothing(to, shape, device):
    for double in (False, True):
        q = quantize(torch.ones(shape, device=device), to, double=double)
        assert q.codes.numel() == 0
        out = dequantize_matrix(q, torch.float16)
        assert out.shape == shape and out.dtype == torch.float16


def test_a_matrix_says_what_it_is():
    q = quantize_matrix(data(8, 64))
    assert (q.format, q.block_size, q.nested, q.shape, q.dtype) == ("nf4", 64, True, (8, 64), F32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.nested = False


@pytest.mark.parametrize("to", FORMATS)
def test_opcheck(to, device):
    x = data(7, 100, dtype=torch.bfloat16).to(device)
    for double in (False, True):
        nested = double and to != "int8"
        for view in (x, x.t(), x[:, ::3]):
            torch.library.opcheck(
                torch.ops.headroom.quantize_matrix, (view, FORMATS[to], 32, nested, True)
            )
        q = quantize(x, to, 32, double)
        torch.library.opcheck(
            torch.ops.headroom.dequantize_matrix,
            (q.codes, q.scales, 7, 100, FORMATS[to], 32, nested, torch.float16),
        )


@pytest.mark.parametrize("to", FORMATS)
def test_compiles(to):
    def both(x):
        return dequantize_matrix(quantize_matrix(x, to))

    x = data(6, 100)
    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))


def bad(q, **changes):
    return lambda: dequantize_matrix(dataclasses.replace(q, **changes))


def test_bad_inputs(device):
    x = data(6, 100).to(device)
    q, bytes_ = quantize(x, double=True), quantize_matrix(x, "int8")
    before = [t.clone() for t in (q.codes, q.scales)]
    op = torch.ops.headroom.dequantize_matrix
    refused = [
        (lambda: quantize(x[0]), "1 dimensions, wanted"),
        (lambda: quantize(x.double()), "matrix has dtype"),
        (lambda: quantize(x, block_size=100), "block_size is 100, wanted a power of two"),
        (lambda: quantize(x, block_size=16), "block_size is 16"),
        (lambda: quantize(x, block_size=2**33 + 64), "block_size is"),
        (lambda: quantize(x.clone().requires_grad_()), "no derivative"),
        (lambda: torch.ops.headroom.quantize_matrix(x, 0, 64, False, False), "format is 0"),
        (lambda: torch.ops.headroom.quantize_matrix(x, 5, 64, False, False), "format is 5"),
        (lambda: torch.ops.headroom.quantize_matrix(x, 3, 64, True, False), "nested"),
        (bad(q, codes=q.codes[:-1]), "codes has 299 elements of .*, wanted 300"),
        (bad(q, codes=q.codes.view(torch.int8)), "codes has"),
        (bad(q, scales=q.scales[:-1]), "scales has 19 elements of .*, wanted 20"),
        (bad(q, scales=q.scales.view(torch.int8)), "scales has"),
        (bad(q, scales=q.scales.to("meta")), "scales"),
        (bad(q, nested=False), "scales has 20 elements of .*, wanted 40"),
        (bad(q, shape=(6, 101)), "codes has 300"),
        (bad(q, shape=(-6, -100)), "shape"),
        (bad(q, shape=(2**40, 2**40)), "codes has 300|shape"),
        (bad(q, format="int8"), "nested"),
        (bad(bytes_, codes=bytes_.codes.view(torch.uint8)), "codes has"),
        (bad(bytes_, scales=bytes_.scales[:-4]), "scales has 20 elements of .*, wanted 24"),
        (bad(q, dtype=torch.float64), "dtype"),
        (lambda: op(q.codes, q.scales, 6, 100, 0, 64, True, F32), "format is 0"),
    ]
    for call, message in refused:
        with pytest.raises(RuntimeError, match=message):
            call()
    assert all(torch.equal(a, b) for a, b in zip(before, (q.codes, q.scales)))
    with pytest.raises(ValueError, match="to is 'int4', wanted one of 'nf4', 'fp4', 'int8'"):
        quantize(x, "int4")
