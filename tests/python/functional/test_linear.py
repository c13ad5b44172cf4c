"""headroom.functional.linear against float64 and torch, and the Linears that call it."""

import os
import subprocess
import sys

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.functional import gemm, linear
from headroom.functional.linear import SLOW_ON_CPU
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = DTYPES[1:]


@pytest.fixture
def slow(monkeypatch):
    """Lets both 16-bit dtypes count as slow, whatever the processor multiplies."""
    before = set(SLOW_ON_CPU)
    SLOW_ON_CPU.update(NARROW)
    yield
    SLOW_ON_CPU.intersection_update(before)


def sample(dtype, device, lead=(3, 5), out=7):
    generator = torch.Generator().manual_seed(0)
    shapes = (*lead, 40), (out, 40), (out,), (*lead, out)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def gradients(function, x, weight, bias, dy):
    given = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = function(*given)
    return y, *torch.autograd.grad(y, given, dy.to(y.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (0,), (3, 5), (2, 2, 70)], ids=str)
def test_values_and_gradients(lead, dtype, device):
    given = sample(dtype, device, lead)
    got, theirs = gradients(linear, *given), gradients(F.linear, *given)
    exact = gradients(F.linear, *(t.double() for t in given))
    for a, b, value in zip(got, theirs, exact, strict=True):
        assert a.dtype == dtype and a.shape == b.shape and a.is_contiguous()
        if a.numel():
            error, limit = ((t.double() - value).abs().max().item() for t in (a, b))
            one = value.abs().max().item() * (torch.finfo(dtype).eps / 2 + 1e-6)
            assert error <= 2 * limit + one


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_result_is_the_sum_in_float32_rounded_once(dtype):
    """To the bit, where torch lends no product: with its sums of widened factors the own loop
    gives the same, because float32 keeps each of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (150, 300), generator=generator).to(dtype)
    weight = torch.randint(-8, 9, (140, 300), generator=generator).to(dtype)
    assert torch.equal(linear(x, weight), (x.float() @ weight.float().T).to(dtype))
    into = gemm(x.T.contiguous(), weight, transpose_a=True, transpose_b=True, out_dtype=torch.float)
    assert torch.equal(into, x.float() @ weight.float().T)


def test_strides_and_autocast(device):
    x, weight, bias, _ = sample(torch.float32, device)
    turned = x.transpose(0, 1)
    torch.testing.assert_close(linear(turned, weight, bias), F.linear(turned, weight, bias))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got, wanted = linear(x, weight, bias), F.linear(x, weight, bias)
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted)


def test_opcheck_of_what_it_calls_and_of_the_question(device):
    x, weight, bias, _ = (t.requires_grad_() for t in sample(torch.float16, device, (5,)))
    options = (False, True, 1.0, 0.0, False, 0)
    torch.library.opcheck(torch.ops.headroom.gemm.default, (x, weight, None, bias, *options))
    torch.library.opcheck(torch.ops.headroom.lends_product.default, (torch.float16,))


def test_flops_and_compilation(device, slow):
    x, weight, bias, _ = sample(torch.float16, device)
    for given in ((x, weight, bias), (x.float(), weight.float(), bias.float())):
        with FlopCounterMode(display=False) as counter:
            linear(*given)
        assert counter.get_total_flops() == 2 * 15 * 7 * 40
    module = headroom.nn.Linear(40, 7, device=device, dtype=torch.float16)
    for function in (linear, lambda x, *_: module(x)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, weight, bias), function(x, weight, bias))


BAD = {
    "wanted \\[..., in\\] and \\[out, in\\]": lambda x, w, b: linear(x, w.T, b),
    "weight \\[40\\], wanted": lambda x, w, b: linear(x, w[0], b),
    "x is \\[\\]": lambda x, w, b: linear(x[0, 0, 0], w, b),
    "bias must be a tensor \\[7\\]": lambda x, w, b: linear(x, w, b[:3]),
    "same dtype": lambda x, w, b: linear(x, w.float(), b),  # of torch
    "weight is None, wanted a tensor": lambda x, w, b: linear(x, None, b),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, slow):
    given = sample(torch.float16, "cpu")[:3]
    before = [t.clone() for t in given]
    with pytest.raises((RuntimeError, TypeError), match=message):
        BAD[message](*given)
    assert all(map(torch.equal, given, before))


# ---- Modules -------------------------------------------------------------------------------------


def calls(module, x):
    """The ops of Headroom that a module calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x)
    return {e.key for e in profile.key_averages() if e.key.startswith("headroom::gemm")}


def test_a_module_asks_for_the_op_in_slow_dtypes_alone(slow):
    module = headroom.nn.Linear(40, 7)
    x = torch.randn(3, 40)
    assert not calls(module, x)
    assert not calls(headroom.nn.Linear(40, 7).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(module, x) and module(x).dtype == torch.bfloat16
    narrow = headroom.nn.Linear(40, 7).half()
    assert calls(narrow, x.half())
    assert torch.equal(narrow(x.half()), linear(x.half(), narrow.weight, narrow.bias))
    with pytest.raises(RuntimeError):  # of torch: dtypes differ
        narrow(x)
    SLOW_ON_CPU.clear()
    assert not calls(narrow, x.half())


def test_patch_swaps_linears_in_slow_dtypes_and_back(slow):
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7), nn.Linear(7, 7).double()).half()
    model[2].float()
    x = torch.randn(3, 40).half()
    report = headroom.patch(model)
    swapped = {name: swaps[0].now for name, swaps in report.swapped.items()}
    assert swapped == dict.fromkeys(("0", "1"), "headroom.functional.linear")
    assert "2 Linear -> headroom.functional.linear" in str(report)
    assert calls(model[:2], x)
    headroom.unpatch(model)
    assert not calls(model[:2], x) and not any("forward" in vars(m) for m in model)
    with torch.autocast("cpu", torch.bfloat16):
        assert {*headroom.patch(model.float()).swapped} == {"0", "1", "2"}
        headroom.unpatch(model)
    SLOW_ON_CPU.clear()
    assert not headroom.patch(model.half()).changed


def test_a_patched_head_is_still_plain(slow):
    from headroom.loss.language_model import is_plain_head

    head = nn.Linear(40, 7).half()
    headroom.patch(head)
    assert is_plain_head(head) and is_plain_head(headroom.nn.Linear(40, 7))
    head.forward = lambda x: x
    assert not is_plain_head(head)


class Backward(TorchDispatchMode):
    """Records in which dtypes gradients of FlashAttention are computed."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flash_attention_for_cpu_backward" in func.name():
            self.dtypes.append(args[0].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mask", (False, True))
@pytest.mark.parametrize("kv_heads", (4, 2))
def test_attention_has_the_result_of_torch_and_a_gradient_in_float32(slow, kv_heads, mask):
    from headroom.nn.flash import attend_masked

    generator = torch.Generator().manual_seed(2)
    shapes = (2, 4, 33, 16), (2, kv_heads, 33, 16), (2, kv_heads, 33, 16)
    given = [torch.randn(s, generator=generator).half().requires_grad_() for s in shapes]
    added = torch.randn(33, 33, generator=generator).half() if mask else None

    def theirs(*qkv, added=added):
        return F.scaled_dot_product_attention(
            *qkv, added, is_causal=not mask, enable_gqa=kv_heads != 4
        )

    dy = torch.randn(shapes[0], generator=generator).half()
    options = {"dropout": 0.0, "causal": not mask, "scale": None}
    y = attend_masked(*given, added, **options)
    other = theirs(*given)
    exact = theirs(*(t.double() for t in given), added=None if added is None else added.double())
    assert torch.equal(y, other)
    with Backward() as seen:
        results = [torch.autograd.grad(y, given, dy)]
    assert seen.dtypes == [torch.float32]
    results += [torch.autograd.grad(t, given, dy.to(t.dtype)) for t in (other, exact)]
    for got, limit, value in zip(*results, strict=True):
        error, limit = ((t - value).abs().max().item() for t in (got, limit))
        assert got.dtype == torch.float16
        assert error <= 2 * limit
    with torch.no_grad():
        assert torch.equal(attend_masked(*given, added, **options), y)


def test_packed_sequences_have_these_bits_too(slow):
    from headroom.nn.flash import attend, attend_masked
    from headroom.nn.pattern import Pattern

    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(1, h, 33, 16, generator=generator).half() for h in (4, 2, 2, 4)]
    *heads, dy = (x.requires_grad_() for x in given)
    pattern = Pattern(None, True, None, torch.tensor([0, 13, 33]), 20)
    y = attend(*heads, pattern)
    got = [y, *torch.autograd.grad(y, heads, dy)]
    for rows in (slice(0, 13), slice(13, 33)):
        own = [x[:, :, rows].detach().requires_grad_() for x in heads]
        alone = attend_masked(*own, None, dropout=0.0, causal=True, scale=None)
        wanted = [alone, *torch.autograd.grad(alone, own, dy[:, :, rows])]
        for x, other in zip(got, wanted, strict=True):
            assert torch.equal(x[:, :, rows], other)


LEVELS = {
    "avx2": {
        "HEADROOM_CPU_LEVEL": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "baseline": {"HEADROOM_CPU_LEVEL": "baseline", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "highest": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
}
PROGRAM = """
import torch
from headroom.functional import linear
from headroom.functional.linear import SLOW_ON_CPU
assert SLOW_ON_CPU == {torch.bfloat16, torch.float16}, SLOW_ON_CPU
generator = torch.Generator().manual_seed(0)
total = 0
for dtype in (torch.bfloat16, torch.float16):
    x, w = (torch.randn(n, 270, generator=generator).to(dtype) for n in (150, 140))
    total += int(linear(x, w).view(torch.int16).long().mul(torch.arange(140)).sum())
print(total)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="not x86")
def test_bits_are_the_same_on_processors_without_the_instructions():
    printed = {
        level: subprocess.run(
            [sys.executable, "-c", PROGRAM], env=os.environ | env, capture_output=True, check=True
        ).stdout
        for level, env in LEVELS.items()
    }
    assert printed["avx2"] == printed["baseline"] == printed["highest"]
