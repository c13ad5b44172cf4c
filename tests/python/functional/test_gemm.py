"""The op headroom::gemm against products in float64 and torch's own."""

import functools
import itertools

import pytest
import torch
from headroom.functional import gemm
from headroom.functional.gemm import matmul_precision
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.fresh import run_fresh
from helpers.software_device import cannot_run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 3, 17, 65, 130)


def sample(m, n, k, dtype, device, *, batch=(), transpose_a=False, transpose_b=False, out=None):
    generator = torch.Generator().manual_seed(m + n + k)

    def made(*shape, to=dtype):
        return torch.randn(*shape, generator=generator).to(device, to)

    a = made(*batch, *((k, m) if transpose_a else (m, k)))
    b = made(*batch, *((n, k) if transpose_b else (k, n)))
    out = out or dtype
    return a, b, made(*batch, m, n, to=out), made(n, to=out)


def reference(a, b, c, bias, transpose_a=False, transpose_b=False, alpha=1.0, beta=1.0):
    product = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)
    return alpha * product + beta * c + bias


def gradients(function, inputs, dy):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(dy.to(y.dtype))
    return y, *(t.grad for t in inputs)


def assert_as_good(ours, theirs, exact, terms=1):
    """At most twice torch's error against float64. Free are one rounding of the largest value, and
    what a sum of so many terms in float32 is off by on average: few elements may be lucky."""
    for k, (got, other, value) in enumerate(zip(ours, theirs, exact)):
        error, limit = ((t.double() - value).abs().max().item() for t in (got, other))
        units = torch.finfo(got.dtype).eps + torch.finfo(torch.float32).eps * terms**0.5
        unit = units * value.abs().max().item() / 2
        assert error <= 2 * limit + unit, f"output {k}: {error} against {limit}"


def check(m, n, k, dtype, device, batch, turn):
    ta, tb = turn & 1 != 0, turn & 2 != 0
    alpha, beta = ((1.0, 1.0), (0.5, -1.5), (2.0, 1.0), (1.0, 0.25))[turn % 4]
    a, b, c, bias = sample(m, n, k, dtype, device, batch=batch, transpose_a=ta, transpose_b=tb)
    options = dict(transpose_a=ta, transpose_b=tb, alpha=alpha, beta=beta)
    dy = torch.randn(*batch, m, n, device=device).to(dtype)

    def ours(a, b, c, bias):
        return gemm(a, b, c=c, bias=bias, **options)

    formula = functools.partial(reference, **options)
    exact = gradients(formula, [t.double() for t in (a, b, c, bias)], dy.double())
    theirs = gradients(formula, (a, b, c, bias), dy)
    got = gradients(ours, (a, b, c, bias), dy)
    assert [t.dtype for t in got] == [dtype] * 5
    assert got[0].is_contiguous()
    assert_as_good(got, theirs, exact, max(m, n, k))
    product = gemm(a, b, transpose_a=ta, transpose_b=tb)
    wanted = (a.mT if ta else a) @ (b.mT if tb else b)
    if device == "cpu" and not batch and torch.ops.headroom.lends_product(dtype):
        assert torch.equal(product, wanted)
    exact = reference(a.double(), b.double(), 0, 0, ta, tb)
    assert_as_good([product], [wanted], [exact], k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("batch", ((), (3,)), ids=("plain", "batch"))
def test_values_and_gradients(turn, dtype, batch, device):
    for m, n, k in ((5, 7, 3), (1, 33, 17), (130, 65, 40)):
        check(m, n, k, dtype, device, batch, turn)


@pytest.mark.parametrize("turn", range(4))
def test_few_rows_are_multiplied_by_torch_on_the_cpu(turn):
    """In float32, on any processor: packing the other factor takes longer than torch's product."""
    turns = {"transpose_a": turn & 1 != 0, "transpose_b": turn & 2 != 0}
    a, b, *_ = sample(4, 40, 1000, torch.float32, "cpu", **turns)
    assert torch.equal(gemm(a, b, **turns), reference(a, b, 0, 0, **turns))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size(dtype, device):
    for turn, (m, n, k) in enumerate(itertools.product(SIZES, SIZES, SIZES)):
        check(m, n, k, dtype, device, ((), (2,))[turn % 2], turn % 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float32_result(dtype, device):
    a, b, c, bias = sample(33, 18, 50, dtype, device, out=torch.float32)
    dy = torch.randn(33, 18, device=device)

    def ours(a, b, c, bias):
        return gemm(a, b, c=c, bias=bias, out_dtype=torch.float32)

    def theirs(a, b, c, bias):
        return reference(a.float(), b.float(), c, bias)

    exact = gradients(reference, [t.double() for t in (a, b, c, bias)], dy.double())
    got = gradients(ours, (a, b, c, bias), dy)
    assert [t.dtype for t in got] == [torch.float32, dtype, dtype, torch.float32, torch.float32]
    other = list(gradients(theirs, (a, b, c, bias), dy))
    rounded = gradients(theirs, (a, b, c, bias), dy.to(dtype).float())  # so is the gradient here
    assert_as_good(got, [*other[:1], *rounded[1:3], *other[3:]], exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype, device):
    a, b, c, _ = sample(12, 20, 16, dtype, device)
    wide = torch.full((12, 40), 7.0, dtype=dtype, device=device)
    rows_apart = wide[:, 5:21].copy_(a)
    columns_apart = wide.new_empty(12, 32)[:, ::2].copy_(a)
    expected = gemm(a, b)
    for view in (rows_apart, columns_apart, a.t().contiguous().t()):
        torch.testing.assert_close(gemm(view, b), expected)
        torch.testing.assert_close(gemm(view.t(), b, transpose_a=True), expected)
        torch.testing.assert_close(gemm(b.t(), view.t()), expected.t())
        leaf = view.detach().requires_grad_()
        gemm(leaf, b).sum().backward()  # its gradient is expanded from one element
        torch.testing.assert_close(leaf.grad, b.sum(1).expand(12, 16), rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(gemm(a, b, c=c.t().contiguous().t()), gemm(a, b, c=c))
    repeated = a.expand(3, 12, 16)
    torch.testing.assert_close(gemm(repeated, b.expand(3, 16, 20))[2], expected)
    turned = torch.stack((a, a), 1).transpose(0, 1)  # matrices of a batch row by row
    torch.testing.assert_close(gemm(turned, b.expand(2, 16, 20))[1], expected)


def test_empty(device):
    for m, n, k in ((0, 3, 2), (3, 0, 2), (3, 4, 0)):
        a, b, c, bias = sample(m, n, k, torch.float32, device)
        for t in (a, b, c, bias):
            t.requires_grad_()
        y = gemm(a, b, c=c, bias=bias, beta=2.0)
        torch.testing.assert_close(y, 2 * c + bias)
        y.sum().backward()
        assert a.grad.shape == a.shape and b.grad.shape == b.shape
        assert torch.equal(c.grad, torch.full_like(c, 2.0))
        assert torch.equal(bias.grad, torch.full_like(bias, m))


def test_beta_zero_does_not_read_c(device):
    a, b, c, _ = sample(3, 4, 5, torch.float32, device)
    c.fill_(float("nan"))
    assert torch.equal(gemm(a, b, c=c, beta=0.0), gemm(a, b))
    assert c.isnan().all()


@pytest.mark.parametrize("turn", (1, 2))
def test_opcheck(turn, device):
    batch = ((), (2,))[turn % 2]
    options = dict(transpose_a=turn & 1 != 0, transpose_b=turn & 2 != 0)
    a, b, c, bias = sample(3, 4, 5, torch.float32, device, batch=batch, **options)
    for t in (a, b, c, bias):
        t.requires_grad_()
    op = torch.ops.headroom.gemm.default
    torch.library.opcheck(op, (a, b, c, bias, *options.values(), 0.5, 2.0, False, 0))
    torch.library.opcheck(op, (a, b, None, None, *options.values(), 1.0, 0.0, True, 0))


def test_other_ways_to_a_gradient(device):
    a, b, c, bias = sample(8, 12, 10, torch.float32, device)
    dy = torch.randn(8, 12, device=device)

    def product(a, b, c, bias):
        return gemm(a, b, c=c, bias=bias, alpha=0.5)

    expected = gradients(product, (a, b, c, bias), dy)

    def reentrant(*inputs):
        return checkpoint(product, *inputs, use_reentrant=True)

    def without_reentry(*inputs):
        return checkpoint(product, *inputs, use_reentrant=False)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    for function in (reentrant, without_reentry, compiled):
        for got, wanted in zip(gradients(function, (a, b, c, bias), dy), expected):
            torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        assert not product(a.requires_grad_(), b, c, bias).requires_grad
    with torch.inference_mode():
        assert torch.equal(product(a, b, c, bias), expected[0])


def test_second_derivative(device):
    a, b, c, bias = (t.double() for t in sample(3, 4, 5, torch.float32, device))
    a32, b32 = a.float().requires_grad_(), b.float().requires_grad_()
    (da,) = torch.autograd.grad(gemm(a32, b32).square().sum(), a32, create_graph=True)
    got = torch.autograd.grad(da.square().sum(), (a32, b32))
    a.requires_grad_(), b.requires_grad_()
    (da,) = torch.autograd.grad((a @ b).square().sum(), a, create_graph=True)
    for x, wanted in zip(got, torch.autograd.grad(da.square().sum(), (a, b))):
        torch.testing.assert_close(x.double(), wanted, rtol=1e-4, atol=1e-2)


def test_only_what_is_needed_is_kept(device):
    a, b, _, bias = sample(6, 5, 4, torch.float32, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = gemm(a, b.requires_grad_(), bias=bias)
    assert {t.untyped_storage().data_ptr() for t in kept} == {a.untyped_storage().data_ptr()}
    y.sum().backward()
    torch.testing.assert_close(b.grad, a.sum(0)[:, None].expand(4, 5))


def test_autocast_is_that_of_matmul(device):
    a, b, c, bias = sample(8, 9, 10, torch.float32, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got, wanted = gemm(a, b, bias=bias), torch.addmm(bias, a, b)
        leaf = a.clone().requires_grad_()
        gemm(leaf, b, c=c).sum().backward()
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted)
    assert leaf.grad.dtype == torch.float32


def test_flops_and_modes(device):
    a, b, _, _ = sample(6, 5, 4, torch.float32, device, batch=(3,), transpose_b=True)
    a.requires_grad_()
    with FlopCounterMode(display=False) as counter:  # the lent product is not counted again
        gemm(a, b, transpose_b=True).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 3 * 6 * 5 * 4
    assert set(counter.get_flop_counts()["Global"]) == {torch.ops.headroom.gemm}


def test_names_in_the_profiler(device):
    a, b, _, _ = sample(6, 5, 4, torch.float32, device)
    a.requires_grad_()
    gemm(a, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gemm(a, b).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"headroom::gemm", "headroom::gemm_backward"} <= names
    if device == "cpu":
        assert "aten::mm" not in names


def capture_first():
    """A graph whose first node is the first product of the process."""
    a, b = (torch.eye(64, device="cuda", dtype=torch.bfloat16) * k for k in (2, 3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = gemm(a, b)
    for k in (1, 5):
        a.copy_(torch.eye(64) * k)
        graph.replay()
        assert torch.equal(product, a * 3)
    return 0


@cannot_run("the process that is forked has no software device")
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_first_product_of_a_process_may_be_captured(tmp_path):
    status, said = run_fresh(tmp_path, capture_first)
    assert status == 0, said


def test_settings_of_torch():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.fp32_precision = "tf32"
        assert matmul_precision(torch.float32) == 1 and matmul_precision(torch.float16) in (0, 2)
        matmul.fp32_precision = "ieee"
        matmul.allow_bf16_reduced_precision_reduction = False
        assert matmul_precision(torch.float32) == matmul_precision(torch.bfloat16) == 0
        matmul.allow_bf16_reduced_precision_reduction = True
        torch.use_deterministic_algorithms(True)
        assert matmul_precision(torch.bfloat16) == 6 and matmul_precision(torch.float32) == 4
        torch.use_deterministic_algorithms(False)
        matmul.allow_bf16_reduced_precision_reduction = False, False
        assert matmul_precision(torch.bfloat16) == 4 and matmul_precision(torch.float32) == 0
        matmul.allow_bf16_reduced_precision_reduction = True
        torch.use_deterministic_algorithms(True)
        compiled = torch.compile(
            lambda x: x + matmul_precision(x.dtype), fullgraph=True, backend="eager"
        )
        assert compiled(torch.zeros((), dtype=torch.bfloat16)) == 6
    finally:
        torch.use_deterministic_algorithms(False)
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = before


BAD = {
    "a has 1 dimensions, wanted 2 or 3": lambda a, b: gemm(a[0], b),
    "b has 1 dimensions, wanted 2 or 3": lambda a, b: gemm(a, b[0]),
    "a and b do not fit": lambda a, b: gemm(a, b, transpose_b=True),
    "a and b do not fit: op\\(a\\)": lambda a, b: gemm(a[None], b.expand(2, 5, 4)),
    "b has dtype .*, but a has": lambda a, b: gemm(a, b.half()),
    "a has dtype": lambda a, b: gemm(a.double(), b.double()),
    "c must have the sizes": lambda a, b: gemm(a, b, c=a),
    "c must have the sizes, dtype": lambda a, b: gemm(a, b, c=(a @ b).half()),
    "bias must be a tensor \\[4\\]": lambda a, b: gemm(a, b, bias=b[0, :3]),
    "bias must be a tensor \\[4\\] with": lambda a, b: gemm(a, b, bias=b[0].half()),
    "config->alpha is nan": lambda a, b: gemm(a, b, alpha=float("nan")),
    "config->beta is inf": lambda a, b: gemm(a, b, c=a @ b, beta=float("inf")),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, device):
    a, b, _, _ = sample(3, 4, 5, torch.float32, device)
    before = a.clone(), b.clone()
    with pytest.raises(RuntimeError, match=message):
        BAD[message](a, b)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])
    with pytest.raises(ValueError, match="out_dtype is torch.float16, wanted torch.float32"):
        gemm(a, b, out_dtype=torch.float16)
    if "config" not in message:  # the fake says the same
        with pytest.raises(RuntimeError, match=message.replace("\\", "\\")):
            with torch._subclasses.FakeTensorMode() as mode:
                BAD[message](mode.from_tensor(a), mode.from_tensor(b))


def test_autocast_casts_what_is_added_to_the_dtype_of_the_result():
    a, b, bias, c = torch.randn(3, 4), torch.randn(4, 2), torch.randn(2), torch.randn(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        wide = gemm(a, b, bias=bias, c=c, out_dtype=torch.float32)
        narrow = gemm(a, b, bias=bias, c=c)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    exact = a.bfloat16().double() @ b.bfloat16().double() + bias.double() + c.double()
    torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(narrow.double(), exact, rtol=3e-2, atol=3e-2)


def test_meta_tensors_have_no_autocast():
    meta = gemm(torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta"))
    assert meta.shape == (2, 5) and meta.is_meta
