"""The op headroom::lora_linear against products in float64 with the decoded matrix."""

from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from headroom.functional import dequantize_matrix, lora_linear, lora_norms, quantize_matrix
from headroom.functional.linear import SLOW_ON_CPU
from headroom.functional.quantize_matrix import FORMATS
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLS, RANK = 33, 70, 3
SCALE, SEED = 0.75, 2**61 + 12345


def weight_of(to, weight):
    return weight if to == "dense" else quantize_matrix(weight, to)


def decoded(weight):
    return weight if isinstance(weight, torch.Tensor) else dequantize_matrix(weight)


def sample(device, to="nf4", dtype=torch.float32, leading=(5,), rank=RANK, adapters=torch.float32):
    """x, a weight, bias, a, b and dy."""
    generator = torch.Generator().manual_seed(rank)

    def made(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    a, b = made(rank, COLS, dtype=adapters) / 8, made(ROWS, rank, dtype=adapters) / 2
    x, weight, bias = made(*leading, COLS), made(ROWS, COLS), made(ROWS)
    return x, weight_of(to, weight), bias, a, b, made(*leading, ROWS)


def gradients(function, *given, dy):
    given = [t.detach().clone().requires_grad_() for t in given]
    y = function(*given)
    return y, *torch.autograd.grad(y, given, dy.to(y.dtype))


def philox(seed, counters):
    """The words of Philox4x32-10, for counters [n, 4]."""
    words = counters.astype(numpy.uint64).T
    low, high = numpy.uint64(seed % 2**32), numpy.uint64(seed >> 32)
    mask = numpy.uint64(2**32 - 1)
    for _ in range(10):
        first, second = words[0] * numpy.uint64(0xD2511F53), words[2] * numpy.uint64(0xCD9E8D57)
        words = [
            (second >> numpy.uint64(32)) ^ words[1] ^ low,
            second & mask,
            (first >> numpy.uint64(32)) ^ words[3] ^ high,
            first & mask,
        ]
        low, high = (low + numpy.uint64(0x9E3779B9)) & mask, high + numpy.uint64(0xBB67AE85) & mask
    return numpy.stack(words, 1)


def factors(m, cols, dropout, seed=SEED):
    """What drop() multiplies each element of [m, cols] with, by headroom.h."""
    groups = -(-cols // 8)
    row, group = (g.ravel() for g in numpy.mgrid[:m, :groups])
    words = philox(seed, numpy.stack((group, 0 * row, row, 0 * row), 1))
    halves = numpy.stack((words & numpy.uint64(0xFFFF), words >> numpy.uint64(16)), 2)
    threshold = int(dropout * 2**16 + 0.5)
    keeps = halves.reshape(m, groups * 8)[:, :cols] >= threshold
    return torch.from_numpy(keeps * (2**16 / (2**16 - threshold)))


def reference(x, weight, bias, a, b, mask=1.0):
    """In the dtype of x."""
    kept = (x.flatten(0, -2) * mask).view(x.shape).to(x.dtype)
    down = F.linear(kept, a.to(x.dtype))
    return F.linear(x, weight.to(x.dtype), bias) + SCALE * F.linear(down, b.to(x.dtype))


@pytest.mark.parametrize("dropout", (0.0, 0.25))
@pytest.mark.parametrize("rank,m", ((1, 40), (3, 1), (3, 16), (16, 40), (64, 17)))
@pytest.mark.parametrize("own", (True, False), ids=("adapters_of_x", "float32_adapters"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", ("dense", *FORMATS))
def test_values_and_gradients_are_as_good_as_those_of_torch(
    to, dtype, own, rank, m, dropout, device
):
    adapters = dtype if own else torch.float32
    x, weight, bias, a, b, dy = sample(device, to, dtype, (m,), rank, adapters)
    mask = factors(m, COLS, dropout).to(device)
    options = {"scale": SCALE, "dropout": dropout, "seed": SEED}
    given = (x, bias, a, b)
    ours = gradients(
        lambda x, bias, a, b: lora_linear(x, weight, bias, a, b, **options), *given, dy=dy
    )
    plain = decoded(weight)
    theirs = gradients(lambda x, *own: reference(x, plain, *own, mask.to(dtype)), *given, dy=dy)
    exact = gradients(
        lambda x, *own: reference(x, plain, *own, mask), *(t.double() for t in given), dy=dy
    )
    for got, other, value, like in zip(ours, theirs, exact, (dy, *given), strict=True):
        assert got.dtype == like.dtype and got.shape == like.shape
        error, limit = ((t.double() - value).abs().max().item() for t in (got, other))
        one = value.abs().max().item() * (torch.finfo(dtype).eps / 2 + 1e-6)
        assert error <= 2 * limit + one


def test_what_is_dropped_is_as_documented(device):
    for m, cols in ((5, 70), (2, 2050)):
        ones, none = torch.ones(m, cols, device=device), torch.zeros(cols, cols, device=device)
        unit = torch.eye(cols, device=device)
        for dropout in (0.1, 0.5, 0.99999, 1e-9):
            x = ones.clone().requires_grad_()
            y = lora_linear(x, none, None, unit, unit, dropout=dropout, seed=SEED)
            wanted = factors(m, cols, min(dropout, 1 - 2**-16)).to(device)
            torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=0)
            dx = torch.autograd.grad(y.sum(), x)[0]
            torch.testing.assert_close(dx.double(), wanted, rtol=1e-6, atol=0)
    assert 0.08 < (factors(64, 1000, 0.1) == 0).double().mean() < 0.12


def test_large_inputs_are_dropped_in_parts(device):
    """Of more than 4 MiB, forward, and columns whose parts have eight at least, backward."""
    m, cols = 600, 2052
    generator = torch.Generator().manual_seed(0)
    x, a, b, dy = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((m, cols), (2, cols), (5, 2), (m, 5))
    )
    weight, mask = torch.zeros(5, cols, device=device), factors(m, cols, 0.5).to(device)
    options = {"dropout": 0.5, "seed": SEED}
    got = gradients(lambda x, a, b: lora_linear(x, weight, None, a, b, **options), x, a, b, dy=dy)
    wanted = gradients(
        lambda x, a, b: (x * mask) @ a.T @ b.T, *(t.double() for t in (x, a, b)), dy=dy
    )
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)


def test_seeds(device):
    x, weight, bias, a, b, _ = sample(device)

    def call(seed=None, dropout=0.5):
        return lora_linear(x, weight, bias, a, b, dropout=dropout, seed=seed)

    assert torch.equal(call(7), call(torch.tensor(7, device=device)))
    assert not torch.equal(call(7), call(8))
    assert torch.equal(call(-1), call(-1))  # any 64 bits
    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    assert torch.equal(call(dropout=0.0), lora_linear(x, weight, bias, a, b))
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn without dropout


def test_a_checkpoint_drops_the_same(device):
    x, weight, bias, a, b, dy = sample(device)

    def layer(x, a, b):
        return lora_linear(x, weight, bias, a, b, dropout=0.5).sin()

    results = []
    for run in (layer, lambda *given: checkpoint(layer, *given, use_reentrant=False)):
        torch.manual_seed(1)
        results.append(gradients(run, x, a, b, dy=dy))
    for got, wanted in zip(*results):
        assert torch.equal(got, wanted)


def test_any_leading_dimensions_strides_and_no_rows(device):
    x, weight, bias, a, b, _ = sample(device, "dense", leading=(3, 4, 5))
    options = {"scale": SCALE}
    y = lora_linear(x, weight, bias, a, b, **options)
    assert y.shape == (3, 4, 5, ROWS) and y.is_contiguous()
    turned_weight, turned_b = weight.T.contiguous().T, b.T.contiguous().T
    gaps = torch.randn(RANK, 2 * COLS, device=device)
    for turned in (x.transpose(0, 2), x[:, ::2], x.expand(2, 3, 4, 5, COLS), x[0, 0, 0]):
        dy = torch.ones(ROWS, device=device).expand(*turned.shape[:-1], ROWS)
        for w in (weight, turned_weight):
            for own in (a, a.T.contiguous().T, gaps[:, :COLS]):
                got = gradients(
                    lambda x, a, w=w: lora_linear(x, w, bias, a, turned_b, **options),
                    *(turned, own),
                    dy=dy,
                )
                wanted = gradients(
                    lambda x, a: F.linear(x, weight, bias) + SCALE * x @ a.T @ b.T,
                    *(turned, own),
                    dy=dy,
                )
                for one, other in zip(got, wanted):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    given = torch.randn(0, 4, COLS, device=device), bias, a, b
    for dropout in (0.0, 0.5):
        y, dx, *others = gradients(
            lambda x, *own, p=dropout: lora_linear(x, weight, *own, dropout=p),
            *given,
            dy=torch.ones(0, 4, ROWS, device=device),
        )
        assert y.shape == (0, 4, ROWS) and dx.shape == given[0].shape
        assert not any(t.any() for t in others)


def test_gradients_of_a_single_row_and_of_none(device):
    def plain(x, bias, a, b, weight):
        return F.linear(x, weight, bias) + SCALE * x @ a.T @ b.T

    for leading in ((), (0,), (2, 0)):
        x, weight, *given, dy = sample(device, "dense", leading=leading)
        ours = gradients(
            lambda x, bias, a, b, w=weight: lora_linear(x, w, bias, a, b, scale=SCALE),
            *(x, *given),
            dy=dy,
        )
        theirs = gradients(partial(plain, weight=weight), x, *given, dy=dy)
        for got, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows,cols", ((0, 5), (5, 0), (0, 0)))
@pytest.mark.parametrize("to", ("dense", *FORMATS))
def test_matrices_without_elements(to, rows, cols, device):
    weight = weight_of(to, torch.zeros(rows, cols, device=device))
    given = [
        torch.randn(*shape, device=device) for shape in ((4, cols), (rows,), (2, cols), (rows, 2))
    ]
    dy = torch.randn(4, rows, device=device)
    got = gradients(lambda x, *own: lora_linear(x, weight, *own, dropout=0.5), *given, dy=dy)
    plain = torch.zeros(rows, cols, device=device)
    for one, other in zip(got, gradients(lambda x, *own: reference(x, plain, *own), *given, dy=dy)):
        torch.testing.assert_close(one, other)


def test_autocast_casts_as_torch_does(device):
    kind = torch.device(device).type
    for to in ("dense", "nf4"):
        x, weight, bias, a, b, dy = sample(device, to, leading=(20,))
        plain = decoded(weight).bfloat16()

        def ours(*own, weight=weight):
            with torch.autocast(kind, torch.bfloat16):
                return lora_linear(own[0], weight, *own[1:], scale=SCALE)

        def theirs(x, bias, a, b, plain=plain):
            with torch.autocast(kind, torch.bfloat16):
                return F.linear(x, plain, bias) + SCALE * F.linear(F.linear(x, a), b)

        results = (gradients(f, x, bias, a, b, dy=dy) for f in (ours, theirs))
        for got, wanted in zip(*results):
            assert got.dtype == wanted.dtype
            error, size = (got - wanted).abs().max(), wanted.abs().max()
            assert error <= 2e-2 * size


def test_what_is_kept(device):
    """x itself, the product with the first adapter, and what is given: x not for a frozen one."""
    x, weight, bias, a, b, dy = sample(device, dtype=torch.bfloat16, leading=(20,))
    x.requires_grad_()
    for frozen in (False, True):
        a.requires_grad_(not frozen), b.requires_grad_(not frozen)
        kept = []
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            y = lora_linear(x, weight, bias, a, b, dropout=0.5)
        given = [x, weight.codes, weight.scales, a, b]
        addresses = {t.data_ptr() for t in given}
        new = [t for t in kept if t.data_ptr() not in addresses]
        assert (x.data_ptr() in {t.data_ptr() for t in kept}) != frozen
        assert sorted(t.nbytes for t in new) == [8] + ([] if frozen else [20 * RANK * 2])
        wanted = [x] if frozen else [x, a, b]
        assert all(g.isfinite().all() for g in torch.autograd.grad(y, wanted, dy))


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


def test_a_pass_takes_4_mib_and_copies_of_the_adapters_beside_its_results():
    m, rows, cols, rank = 1100, 2048, 3072, 16
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, cols, generator=generator).bfloat16().requires_grad_()
    weight = quantize_matrix(torch.randn(rows, cols, generator=generator).bfloat16())
    a, b = (
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((rank, cols), (rows, rank))
    )
    small = (4 << 20) + 2 * rank * (rows + cols + m) + 8192
    assert x.nbytes > small  # no copy of it fits
    if torch.cpu._is_amx_tile_supported():
        small += 3 << 20  # oneDNN's own, in products by tiles
    elif torch.bfloat16 not in SLOW_ON_CPU and not torch.cpu._is_avx512_bf16_supported():
        small += 13 << 20  # oneDNN's own, which widens both factors
    results = []
    call = lambda: results.append(lora_linear(x, weight, None, a, b, dropout=0.1))  # noqa: E731
    call()
    assert peak_of(call) <= small + results[0].nbytes
    y = results.pop()
    dy = torch.ones_like(y)
    made = x.nbytes + a.nbytes + b.nbytes
    assert peak_of(lambda: torch.autograd.grad(y, (x, a, b), dy)) <= small + made


BAD = {
    r"x is \[5, 69\], wanted \[..., 70\] for a matrix \[33, 70\]": {"x": lambda x: x[:, 1:]},
    r"x is \[\]": {"x": lambda x: x[0, 0]},
    "x is None, wanted a tensor": {"x": lambda x: None},
    "x has dtype (torch.float64|Double)": {"x": lambda x: x.double()},
    "weight is None, wanted a tensor": {"weight": lambda w: None},
    r"weight is \[33\], wanted \[out, in\]": {"weight": lambda w: w[:, 0]},
    "weight has dtype (torch.float16|Half), but x has": {"weight": lambda w: w.half()},
    "weight requires grad, but gets no gradient": {"weight": lambda w: w.requires_grad_()},
    "a is None, wanted a tensor": {"a": lambda a: None},
    "a has dtype (torch.float16|Half), .*x": {"a": lambda a: a.half()},
    r"a must be a matrix \[rank, 70\] with 1 row or more": {"a": lambda a: a[:, 1:]},
    r"a must be a matrix \[rank, 70\] with 1 row or more ": {"a": lambda a: a[:0]},
    "b has dtype Half, but a has Float": {"b": lambda b: b.half()},
    r"b must be a matrix \[33, 3\]": {"b": lambda b: b[:, :2]},
    "bias has dtype": {"bias": lambda b: b.double()},
    r"bias must be a tensor \[33\]": {"bias": lambda b: b[:4]},
    "dropout is 1.0, wanted a number from 0 to below 1": {"dropout": 1.0},
    "dropout is nan": {"dropout": float("nan")},
    "config->scale is inf, wanted a finite binary32": {"scale": float("inf")},
    "seed must be an int64 tensor of one element": {
        "dropout": 0.5,
        "seed": torch.zeros(1, dtype=torch.int32),
    },
    "is on (meta|another device)": {"a": lambda a: a.to("meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message):
    names = ("x", "weight", "bias", "a", "b")
    given = dict(zip(names, sample("cpu", "dense")))
    before = [t.clone() for t in given.values()]
    changed = {
        name: change(given[name]) if callable(change) else change
        for name, change in BAD[message].items()
    }
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message.strip()):
        lora_linear(**given | changed)
    assert all(map(torch.equal, given.values(), before))


def test_gradients_that_read_what_was_not_kept_are_refused():
    x, q, _, a, b, dy = sample("cpu")
    numbers = (COLS, FORMATS["nf4"], q.block_size, q.nested, 1.0, 0.0, 0)
    op = torch.ops.headroom.lora_linear_backward
    for name, wanted in (("x", (False, True, False)), ("t", (False, False, True))):
        with pytest.raises(RuntimeError, match=f"{name} is None, but a gradient is wanted"):
            op(dy, None, None, q.codes, q.scales, a, b, None, *numbers, *wanted)
    with pytest.raises(RuntimeError, match="x must be a tensor of 5 rows of 70"):
        op(dy, x[1:], None, q.codes, q.scales, a, b, None, *numbers, False, True, False)
    with pytest.raises(RuntimeError, match="scales is None, but weight has few bits"):
        op(dy, None, None, q.codes, None, a, b, None, *numbers, True, False, False)


@pytest.mark.parametrize("to", ("dense", *FORMATS))
def test_opcheck(to, device):
    x, weight, bias, a, b, dy = sample(device, to, torch.bfloat16)
    seed = torch.tensor(SEED, device=device)
    if to == "dense":
        own, layout = (weight, None), (0, 0, False)
    else:
        own, layout = (
            (weight.codes, weight.scales),
            (FORMATS[to], weight.block_size, weight.nested),
        )
    for tensor in (x, bias, a, b):
        tensor.requires_grad_()
    ops = torch.ops.headroom
    forward = (x, *own, bias, a, b, seed, ROWS, *layout, SCALE, 0.5, 0)
    torch.library.opcheck(ops.lora_linear.default, forward)
    _, t = ops.lora_linear(*forward)
    torch.library.opcheck(
        ops.lora_linear_backward.default,
        (dy, x.detach(), t, *own, a.detach(), b.detach(), seed, COLS, *layout, SCALE, 0.5, 0)
        + (True, False, True),
    )
    sizes = 7, ROWS, COLS, RANK, 1, 0, *layout, 0.5, True, False, 0
    torch.library.opcheck(ops.lora_linear_workspace.default, sizes)


@pytest.mark.parametrize("dropout", (0.0, 0.5))
def test_compilation_flops_and_names_in_a_profile(dropout, device):
    x, weight, bias, a, b, dy = sample(device, "int8")

    def train(x, bias, a, b):
        return lora_linear(x * 2, weight, bias, a, b, scale=SCALE, dropout=dropout).sin()

    compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, train):
        torch.manual_seed(0)
        results.append(gradients(function, x, bias, a, b, dy=dy))
    for got, wanted in zip(*results):
        assert torch.equal(got, wanted)
    given = [t.requires_grad_() for t in (x, bias, a, b)]
    with FlopCounterMode(display=False) as counter:
        train(*given).sum().backward()
    small = 2 * 5 * RANK * (ROWS + COLS)
    assert counter.get_total_flops() == 2 * 2 * 5 * ROWS * COLS + small + 2 * small
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train(*given).sum().backward()
    names = {event.key for event in seen.key_averages()}
    assert {"headroom::lora_linear", "headroom::lora_linear_backward"} <= names


# ---- Norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", (1, 3, 40))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", ("dense", *FORMATS))
def test_norms_of_rows(to, dtype, rank, device):
    _, weight, _, a, b, _ = sample(device, to, dtype, rank=rank)
    a.requires_grad_()
    got = lora_norms(weight, a, b, scale=SCALE)
    own = [t.detach().to(dtype).double() for t in (a, b)]
    exact = (decoded(weight).double() + SCALE * own[1] @ own[0]).norm(dim=1)
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=0)


def test_norms_of_what_cancels_and_of_many_rows(device):
    """Rows that adapters make zeros, also of matrices of several parts."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 1024, generator=generator).to(device)
    b = torch.randn(3000, 2, generator=generator).to(device)
    weight = b @ a
    norms = lora_norms(weight, a, b, scale=-1.0)
    assert (norms <= 2e-3 * weight.norm(dim=1)).all()  # the root of what is left of a square
    q = quantize_matrix(weight)
    exact = (dequantize_matrix(q).double() + b.double() @ a.double()).norm(dim=1)
    torch.testing.assert_close(lora_norms(q, a, b).double(), exact, rtol=3e-6, atol=0)
    part = (32 + 32 if weight.is_cuda else 4) << 20  # a product's workspace, beside its part
    assert peak_of(lambda: lora_norms(q, a, b)) <= part + 3000 * (2 + 1) * 4 + 8192


def test_norms_refuse_and_compile():
    _, weight, _, a, b, _ = sample("cpu")
    for bad in (lambda: lora_norms(weight, a[:, 1:], b), lambda: lora_norms(weight, a, b[1:])):
        with pytest.raises(RuntimeError, match="wanted a matrix that fits"):
            bad()
    with pytest.raises(RuntimeError, match=r"b must be a matrix \[33, 3\]"):
        lora_norms(weight, a, b[:, 1:])
    with pytest.raises(TypeError, match="a is None"):
        lora_norms(weight, None, b)
    compiled = torch.compile(
        lambda a, b: lora_norms(weight, a, b) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(a, b), lora_norms(weight, a, b) * 2)
    layout = (FORMATS["nf4"], weight.block_size, weight.nested)
    given = (weight.codes, weight.scales, a, b, *layout, torch.float16, SCALE, 0)
    torch.library.opcheck(torch.ops.headroom.lora_norms.default, given)
