"""The op headroom::attention_sinks against the formula, with all probabilities, in float64."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import sink_attention
from headroom.functional.attention_sinks import is_fused
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers.bits import assert_same_bits

HEADS, KV_HEADS, SIZE = 4, 2, 16
ENDS = [0, 40, 40, 110, 133]
CASES = {
    "causal": dict(causal=True),
    "all ways": dict(causal=False),
    "window": dict(causal=True, window=9),
    "window, all ways": dict(causal=False, window=9, scale=0.4),
    "packed": dict(causal=True, ends=ENDS),
    "packed, window": dict(causal=True, window=9, ends=ENDS),
}


def sample(dtype, device="cpu", batch=2, tokens=133, kv_heads=KV_HEADS):
    """q, k, v and sinks, and a gradient. Heads lie as a projection gives them."""
    torch.manual_seed(0)
    packed = torch.randn(batch, tokens, HEADS + 2 * kv_heads, SIZE).to(device, dtype)
    heads = packed.transpose(1, 2).split([HEADS, kv_heads, kv_heads], 1)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 6.0]).to(device, dtype)
    inputs = [x.detach().requires_grad_() for x in (*heads, sinks)]
    return inputs, torch.randn(batch, HEADS, tokens, SIZE).to(device, dtype)


def formula(q, k, v, sinks, causal=True, window=None, ends=None, scale=None):
    """With a column of sinks beside all scores."""
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    index = torch.arange(tokens, device=q.device)
    distance = index[:, None] - index
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= (distance < window) & (distance > -window)
    if ends is not None:
        sequence = torch.searchsorted(torch.tensor(ends[1:], device=q.device), index, right=True)
        seen &= sequence[:, None] == sequence
    scores = scores.masked_fill(~seen, float("-inf"))
    column = sinks.view(-1, 1, 1).expand(len(q), -1, tokens, 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def ours(*inputs, ends=None, **options):
    if ends is not None:
        options["cu_seqlens"] = torch.tensor(ends, device=inputs[0].device)
    return sink_attention(*inputs, **options)


def results(attend, inputs, grad, **options):
    out = attend(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def in_float64(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["first", "efficient"])
def test_errors_are_not_larger_than_those_of_eager_attention(case, dtype, kernel, device):
    options = CASES[case]
    inputs, grad = sample(dtype, device, batch=1 if "ends" in options else 2)
    only = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if kernel == "efficient" else nullcontext()
    with only:
        got = results(ours, inputs, grad, **options)
    theirs = results(formula, inputs, grad, **options)
    true = results(formula, in_float64(inputs), grad.double(), **options)
    for x, a, b, c in zip([inputs[0], *inputs], got, theirs, true, strict=True):
        assert a.dtype == dtype and a.shape == x.shape
        factor = 2 if dtype == torch.float32 else 1
        rounding = torch.finfo(dtype).eps * c.norm() / 2
        assert (a - c).norm() <= factor * (b - c).norm() + rounding


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_in_float64(case, kv_heads):
    options = CASES[case]
    batch = 1 if "ends" in options else 2
    inputs, grad = sample(torch.float64, batch=batch, kv_heads=kv_heads)
    pairs = zip(results(ours, inputs, grad, **options), results(formula, inputs, grad, **options))
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_without_a_share_it_is_attention():
    inputs, grad = sample(torch.float32)
    inputs[3].data.fill_(float("-inf"))
    got = results(ours, inputs, grad)
    out = F.scaled_dot_product_attention(*inputs[:3], is_causal=True, enable_gqa=True)
    assert_same_bits(got[:4], [out, *torch.autograd.grad(out, inputs[:3], grad)])
    assert not got[4].any()


def test_sequences_have_the_values_that_they_have_alone(device):
    inputs, grad = sample(torch.float32, device, batch=1)
    got = results(ours, inputs, grad, ends=ENDS)
    sums = torch.zeros(HEADS, device=device)
    for start, end in ((0, 40), (40, 110), (110, 133)):
        own = [x.detach()[:, :, start:end].requires_grad_() for x in inputs[:3]] + [inputs[3]]
        *alone, dsinks = results(ours, own, grad[:, :, start:end])
        torch.testing.assert_close([x[:, :, start:end] for x in got[:4]], alone)
        sums += dsinks
    torch.testing.assert_close(got[4], sums)


def test_rows_end_where_packed_sequences_do(device):
    inputs, grad = sample(torch.float32, device)
    for longest in (None, 133, 10**6):
        ends = torch.tensor([0, 133, 266], device=device)
        attend = functools.partial(sink_attention, cu_seqlens=ends, longest=longest)
        assert_same_bits(results(attend, inputs, grad), results(ours, inputs, grad))


@pytest.mark.parametrize("window", [None, 64])
def test_nothing_is_kept_or_made_for_pairs_of_tokens(window):
    tokens = 2048
    inputs, _ = sample(torch.float32, batch=1, tokens=tokens)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = sink_attention(*inputs, window=window)
    assert [x.data_ptr() for x in kept[:5]] == [x.data_ptr() for x in (*inputs, out)]
    (sums,) = kept[5:]
    assert sums.dtype == torch.float32 and sums.shape == (HEADS, tokens)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        sink_attention(*inputs, window=window).sum().backward()
    events = profile.profiler.kineto_results.events()
    most = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert 0 < most < tokens**2 * 4 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_sinks_do_not_depend_on_threads(dtype):
    inputs, grad = sample(dtype, tokens=700)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(results(ours, inputs, grad)[4])
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(*found)


def test_sinks_of_another_dtype_and_frozen_ones():
    (*heads, sinks), grad = sample(torch.bfloat16)
    wide = sinks.detach().float().requires_grad_()
    got = results(ours, [*heads, wide], grad)
    assert got[0].dtype == torch.bfloat16 and got[4].dtype == torch.float32
    torch.testing.assert_close(got[4].bfloat16(), results(ours, [*heads, sinks], grad)[4])
    out = sink_attention(*heads, sinks.detach())
    assert_same_bits(torch.autograd.grad(out, heads, grad), got[1:4])
    backward = torch.ops.headroom.attention_sinks_backward
    q, k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in heads)
    given = q, k, v, wide.detach()
    out, sums = torch.ops.headroom.attention_sinks(*given, None, 133, True, 0, None)
    assert backward(out, *given, out, sums, None, 133, True, 0, None, False)[3].numel() == 0


def test_autocast(device):
    inputs, _ = sample(torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        out = sink_attention(*inputs)
    lowered = [x.bfloat16() for x in inputs[:3]]
    assert_same_bits([out], [sink_attention(*lowered, inputs[3])])


@pytest.mark.parametrize("case", ["window", "packed"])
def test_opcheck(case):
    options = dict(CASES[case])
    (q, k, v, sinks), _ = sample(torch.float32, batch=1, tokens=133)
    heads = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v)]
    ends = options.pop("ends", None)
    ends = None if ends is None else torch.tensor(ends)
    given = ends, 133, options["causal"], options.get("window", 0), None
    utils = "test_schema", "test_faketensor", "test_autograd_registration"
    check = functools.partial(torch.library.opcheck, test_utils=utils)
    op = torch.ops.headroom.attention_sinks
    check(op.default, (*heads, sinks, *given))
    out, sums = op(*heads, sinks, *given)
    tensors = [x.detach() for x in (out, *heads, sinks, out, sums)]
    backward = torch.ops.headroom.attention_sinks_backward
    check(backward.default, (*tensors, *given, True))


@pytest.mark.parametrize("case", ["causal", "window"])
def test_compiles(case, fresh_dynamo):
    inputs, grad = sample(torch.float32)
    attend = functools.partial(sink_attention, **CASES[case])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_same_bits(results(compiled, inputs, grad), results(attend, inputs, grad))


def test_flops():
    inputs, grad = sample(torch.float32)
    product = 2 * 2 * HEADS * SIZE * 133  # of a query with each key, of two rows
    for window, seen in ((None, 133), (9, 9)):
        with FlopCounterMode(display=False) as forward:
            out = sink_attention(*inputs, window=window)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out, inputs, grad)
        counts = forward.get_total_flops(), backward.get_total_flops()
        assert counts == (2 * product * seen, 5 * product * seen)


@pytest.mark.parametrize("batch, tokens", [(0, 5), (2, 0)])
def test_no_tokens(batch, tokens):
    inputs, grad = sample(torch.float32, batch=batch, tokens=tokens)
    *heads, sinks = results(ours, inputs, grad)
    assert all(x.numel() == 0 for x in heads) and sinks.tolist() == [0] * HEADS


def test_second_derivatives():
    inputs, _ = sample(torch.float32)
    (grad,) = torch.autograd.grad(sink_attention(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "dtype, size, capability, fused",
    [
        (torch.float32, 64, (7, 5), True),
        (torch.float32, 66, (9, 0), False),
        (torch.float16, 64, (7, 5), True),
        (torch.bfloat16, 64, (7, 5), False),
        (torch.bfloat16, 64, (8, 0), True),
        (torch.bfloat16, 512, (8, 0), True),
        (torch.float16, 68, (8, 0), False),
    ],
)
def test_which_heads_a_gpu_has_kernels_for(dtype, size, capability, fused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert is_fused(torch.device("cuda"), dtype, size) == fused


H, S, I64 = (2, 4, 5, 8), (4,), torch.int64
BAD = {
    "q is .*, wanted .batch, heads": dict(q=(4, 5, 8)),
    "wanted the same batch and tokens": dict(k=(2, 4, 6, 8)),
    "q has 4 heads, wanted a multiple of the 3 of k": dict(k=(2, 3, 5, 8), v=(2, 3, 5, 8)),
    "with the same tokens and head_dim": dict(v=(2, 4, 5, 6)),
    "q has dtype torch.int64": dict(dtypes=(I64, I64, I64)),
    "v has dtype torch.float16, but q has": dict(dtypes=(None, None, torch.float16)),
    r"sinks is torch.float32 .3., wanted .*.4., one for each head": dict(sinks=(3,)),
    "cu_seqlens is torch.float32": dict(cu_seqlens=torch.tensor([0.0, 10.0])),
    "cu_seqlens is .0, 7., wanted 0 and then .* up to 10": dict(cu_seqlens=torch.tensor([0, 7])),
    "window is 0, wanted 1": dict(window=0),
    "longest is 0, wanted 1": dict(longest=0),
    "causal is 1, wanted True or False": dict(causal=1),
    "sinks is None, wanted a tensor": dict(sinks=None),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    given = dict(BAD[message])
    dtypes = given.pop("dtypes", (None,) * 3)
    shapes = {name: given.pop(name, H) for name in ("q", "k", "v")}
    heads = [torch.zeros(shape, dtype=d) for shape, d in zip(shapes.values(), dtypes)]
    sinks = given.pop("sinks", S)
    sinks = None if sinks is None else torch.zeros(sinks)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        sink_attention(*heads, sinks, **given)
