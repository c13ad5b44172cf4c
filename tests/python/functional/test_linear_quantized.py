"""The op headroom::linear_quantized against products in float64 with the decoded matrix."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import dequantize_matrix, linear_quantized, quantize_matrix
from headroom.functional.quantize_matrix import FORMATS
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLS = 33, 70


def sample(to, dtype, device, leading=(5,), rows=ROWS, cols=COLS, **options):
    generator = torch.Generator().manual_seed(rows + cols)

    def made(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q = quantize_matrix(made(rows, cols), to, **options)
    return made(*leading, cols), q, made(rows), made(*leading, rows)


def gradients(function, x, bias, dy):
    x, bias = (t.detach().clone().requires_grad_() for t in (x, bias))
    y = function(x, bias)
    return y, *torch.autograd.grad(y, (x, bias), dy.to(y.dtype))


@pytest.mark.parametrize("m", (1, 4, 16, 17, 40))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", FORMATS)
def test_values_and_gradients_are_as_good_as_those_with_the_decoded_matrix(to, dtype, m, device):
    x, q, bias, dy = sample(to, dtype, device, (m,), block_size=32, double=m % 2 == 0)
    decoded = dequantize_matrix(q)
    assert decoded.dtype == dtype
    ours = gradients(lambda x, b: linear_quantized(x, q, b), x, bias, dy)
    theirs = gradients(lambda x, b: F.linear(x, decoded, b), x, bias, dy)
    exact = gradients(
        lambda x, b: F.linear(x, decoded.double(), b), x.double(), bias.double(), dy.double()
    )
    for got, other, value in zip(ours, theirs, exact):
        assert got.dtype == dtype
        error, limit = ((t.double() - value).abs().max().item() for t in (got, other))
        one = value.abs().max().item() * (torch.finfo(dtype).eps / 2 + 1e-6)
        assert error <= 2 * limit + one


def test_any_leading_dimensions_strides_and_no_rows(device):
    x, q, bias, _ = sample("nf4", torch.float32, device, (3, 4, 5))
    y = linear_quantized(x, q, bias)
    assert y.shape == (3, 4, 5, ROWS) and y.is_contiguous()
    for turned in (x.transpose(0, 2), x[:, ::2], x.expand(2, 3, 4, 5, COLS), x[0, 0, 0]):
        got = linear_quantized(turned, q, bias)
        torch.testing.assert_close(got, F.linear(turned, dequantize_matrix(q), bias))
    strided = torch.randn(COLS, 7, device=device).T
    wanted = F.linear(strided, dequantize_matrix(q))
    torch.testing.assert_close(linear_quantized(strided, q), wanted, rtol=1e-4, atol=1e-4)
    empty = torch.randn(0, 4, COLS, device=device, requires_grad=True)
    y = linear_quantized(empty, q, bias)
    assert y.shape == (0, 4, ROWS)
    assert torch.autograd.grad(y.sum(), empty)[0].shape == empty.shape
    for leading in ((), (0,), (2, 0)):
        x, q, bias, dy = sample("nf4", torch.float32, device, leading)
        ours = gradients(lambda x, b, q=q: linear_quantized(x, q, b), x, bias, dy)
        decoded = dequantize_matrix(q)
        theirs = gradients(lambda x, b, w=decoded: F.linear(x, w, b), x, bias, dy)
        for got, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows,cols", ((0, 5), (5, 0), (0, 0)))
@pytest.mark.parametrize("to", FORMATS)
def test_matrices_without_elements(to, rows, cols, device):
    x, q, bias, dy = sample(to, torch.float32, device, (4,), rows, cols)
    got = gradients(lambda x, b: linear_quantized(x, q, b), x, bias, dy)
    weight = torch.zeros(rows, cols, device=device)
    for a, b in zip(got, gradients(lambda x, b: F.linear(x, weight, b), x, bias, dy)):
        assert torch.equal(a, b)
    assert not linear_quantized(x, q).any()


def at_odd_addresses(q):
    def moved(tensor):
        bytes = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        bytes[1:] = tensor.flatten()
        return bytes[1:].view(tensor.shape)

    return replace(q, codes=moved(q.codes), scales=moved(q.scales))


@pytest.mark.parametrize("m", (3, 20))
@pytest.mark.parametrize("to", FORMATS)
def test_codes_and_scales_may_lie_at_any_address(to, m, device):
    x, q, bias, _ = sample(to, torch.bfloat16, device, (m,), cols=96)
    odd = at_odd_addresses(q)
    assert odd.codes.data_ptr() % 4 and odd.scales.data_ptr() % 4
    assert torch.equal(linear_quantized(x, odd, bias), linear_quantized(x, q, bias))


def test_the_dtype_is_that_of_x_and_autocast_casts_as_torch_does(device):
    kind = torch.device(device).type
    x, q, bias, dy = sample("nf4", torch.float32, device, (20,))
    assert linear_quantized(x.half(), q, bias.half()).dtype == torch.float16
    weight = dequantize_matrix(q, torch.bfloat16)

    def ours(x, b):
        with torch.autocast(kind, torch.bfloat16):
            return linear_quantized(x, q, b)

    def theirs(x, b):
        with torch.autocast(kind, torch.bfloat16):
            return F.linear(x, weight, b)

    for got, wanted in zip(gradients(ours, x, bias, dy), gradients(theirs, x, bias, dy)):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    with torch.autocast(kind, torch.bfloat16), pytest.raises(RuntimeError, match="x has dtype"):
        linear_quantized(x.double(), q)


def test_nothing_is_kept_but_the_codes_and_their_scales(device):
    x, q, bias, dy = sample("nf4", torch.float32, device, (20,))
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear_quantized(x.requires_grad_(), q, bias.requires_grad_())
    assert [t.data_ptr() for t in kept] == [q.codes.data_ptr(), q.scales.data_ptr()]
    with torch.no_grad():
        x.add_(1)  # not read again
    assert torch.autograd.grad(y, x, dy)[0].isfinite().all()


def peak_of(function):
    """Bytes that torch allocated on the CPU at the most, above those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("m", (1, 40))
def test_a_forward_takes_4_mib_beside_its_result(m):
    x, q, _, dy = sample("nf4", torch.bfloat16, "cpu", (m,), 2048, 3072)
    x.requires_grad_()
    linear_quantized(x, q)  # what is allocated once
    results = []
    assert peak_of(lambda: results.append(linear_quantized(x, q))) <= (4 << 20) + dy.nbytes + 4096
    (y,) = results
    assert peak_of(lambda: torch.autograd.grad(y, x, dy)) <= (4 << 20) + 2 * x.nbytes + 4096


BAD = {
    r"x is \[5, 71\], wanted \[..., 70\] for a matrix \[33, 70\]": lambda x, q, b: linear_quantized(
        torch.cat((x, x[:, :1]), 1), q
    ),
    r"x is \[\]": lambda x, q, b: linear_quantized(x[0, 0], q),
    "x is None, wanted a tensor": lambda x, q, b: linear_quantized(None, q),
    "x has dtype (torch.f|Dou|torch.float64|F64).*": lambda x, q, b: linear_quantized(
        x.double(), q
    ),
    "bias has dtype": lambda x, q, b: linear_quantized(x, q, b.double()),
    r"bias must be a tensor \[33\]": lambda x, q, b: linear_quantized(x, q, b[:4]),
    "codes has .* elements": lambda x, q, b: linear_quantized(x, replace(q, codes=q.codes[:9]), b),
    "scales has .* elements": lambda x, q, b: linear_quantized(x, replace(q, scales=q.scales[1:])),
    "codes has .*uint8": lambda x, q, b: linear_quantized(x, replace(q, codes=q.codes.char())),
    "block_size is 48": lambda x, q, b: linear_quantized(x, replace(q, block_size=48)),
    "is on meta|is on another device": lambda x, q, b: linear_quantized(
        x, replace(q, codes=q.codes.to("meta"))
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message):
    x, q, bias, _ = sample("nf4", torch.float32, "cpu")
    given = (x, q.codes, q.scales, bias)
    before = [t.clone() for t in given]
    with pytest.raises((RuntimeError, TypeError), match=message):
        BAD[message](x, q, bias)
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("to", FORMATS)
def test_opcheck(to, device):
    x, q, bias, dy = sample(to, torch.float32, device)
    numbers = (FORMATS[to], q.block_size, q.nested, 0)
    x.requires_grad_(), bias.requires_grad_(), dy.requires_grad_()
    ops = torch.ops.headroom
    torch.library.opcheck(
        ops.linear_quantized.default, (x, q.codes, q.scales, bias, ROWS, *numbers)
    )
    torch.library.opcheck(
        ops.linear_quantized_backward.default, (dy, q.codes, q.scales, COLS, *numbers)
    )
    sizes = 7, ROWS, COLS, 0, *numbers[:3], True, False, 0
    torch.library.opcheck(ops.linear_quantized_workspace.default, sizes)


def test_compilation_flops_and_names_in_a_profile(device):
    x, q, bias, dy = sample("int8", torch.float32, device)

    def train(x, bias):
        return linear_quantized(x * 2, q, bias).sin()

    compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(gradients(compiled, x, bias, dy), gradients(train, x, bias, dy)):
        assert torch.equal(got, wanted)
    x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear_quantized(x, q, bias).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * ROWS * COLS
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        linear_quantized(x, q, bias).sum().backward()
    names = {event.key for event in seen.key_averages()}
    assert {"headroom::linear_quantized", "headroom::linear_quantized_backward"} <= names
