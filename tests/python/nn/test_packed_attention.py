"""Attention of packed sequences and windows: the values of a mask of all pairs, without one."""

from __future__ import annotations

import functools

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.nn import (
    LEVELS,
    Attention,
    Pattern,
    Transformer,
    TransformerConfig,
    attention_pattern,
    flash,
)
from headroom.nn.flash import attend
from headroom.nn.pattern import masked
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.bits import assert_same_bits
from helpers.blocks import block_and_input, gradients
from helpers.kept import kept_bytes

ENDS = torch.tensor([0, 7, 7, 20, 24])
PATTERNS = {
    "packed": dict(causal=True, cu_seqlens=ENDS),
    "window": dict(causal=True, window=5),
    "both": dict(causal=True, window=5, cu_seqlens=ENDS),
    "all ways": dict(causal=False, cu_seqlens=ENDS),
    "both, all ways": dict(causal=False, window=5, cu_seqlens=ENDS[:4]),  # one more behind the end
}


def heads(batch=1, tokens=24, size=8, value_size=8, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = ((4, size), (2, size), (2, value_size))
    made = [torch.randn(batch, tokens, *each).to(dtype).transpose(1, 2) for each in sizes]
    return [x.requires_grad_() for x in made]


def results(function, inputs):
    out = function(*inputs)
    torch.manual_seed(1)
    grad = torch.randn(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def assert_close(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def both_ways(name, inputs, attend=attend, **options):
    """Results with a pattern, and with it as a mask."""
    x = inputs[0].transpose(1, 2)
    pattern = attention_pattern(x, **PATTERNS[name])
    assert pattern.mask is None
    by_mask = masked(pattern, x)
    assert by_mask.mask is not None and by_mask[1:] == (False, None, None, None)
    run = functools.partial(attend, pattern=pattern, **options)
    return results(run, inputs), results(
        functools.partial(flash.attend, pattern=by_mask, **options), inputs
    )


def largest(run):
    """The most bytes that are allocated at once, in operations too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("batch", [1, 2])
def test_values_are_those_of_a_mask(name, batch):
    assert_close(*both_ways(name, heads(batch)))


OTHERS = {
    "head sizes that differ": (dict(value_size=12), {}),
    "float64, scaled": (dict(dtype=torch.float64), dict(scale=0.2)),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("case", OTHERS)
def test_what_the_op_does_not_take_goes_sequence_by_sequence(name, case):
    sizes, options = OTHERS[case]
    assert_close(*both_ways(name, heads(2, **sizes), **options))


@pytest.mark.parametrize("name", PATTERNS)
def test_the_choice_of_kernels_is_the_users(name):
    with sdpa_kernel(SDPBackend.MATH):
        out = attend(*heads(), attention_pattern(torch.empty(1, 24, 1), **PATTERNS[name]))
        assert_close(*both_ways(name, heads()))
    names = set()
    queue = [out.grad_fn]
    while queue:
        node = queue.pop()
        names.add(node.name())
        queue += [following for following, _ in node.next_functions if following is not None]
    assert not any("Flash" in each or "segments" in each for each in names)


def test_dropout():
    """Of all probabilities nothing is left; of half of them, twice the rest."""
    q, k, _ = heads()
    v = torch.ones(1, 2, 24, 8)
    pattern = attention_pattern(q.transpose(1, 2), **PATTERNS["both"])
    assert not attend(q, k, v, pattern, dropout=1.0).any()
    out = attend(q, k, v, pattern, dropout=0.5)
    assert out.mean().item() == pytest.approx(1, abs=0.2)
    assert out[0, :, 0].unique().tolist() in ([0], [2], [0, 2])  # it sees itself alone


@pytest.mark.parametrize("name", ["packed", "window", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_has_all_pairs(name, dtype):
    tokens = 2048
    options = dict(PATTERNS[name])
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.arange(0, tokens + 1, 128)
    attention = Attention(16, 4, kv_heads=2, window=options.get("window")).to(dtype)
    x = torch.randn(1, tokens, 16, dtype=dtype, requires_grad=True)
    ends = options.get("cu_seqlens")
    most = largest(lambda: attention(x, cu_seqlens=ends).sum().backward())
    assert 0 < most < tokens**2 * dtype.itemsize / 4
    pattern = attention_pattern(x, **options)
    assert largest(lambda: masked(pattern, x)) >= tokens**2 * dtype.itemsize


@pytest.mark.parametrize("name", ["packed", "window"])
def test_kept_bytes_grow_with_the_tokens(name):
    """Attention alone keeps q, k, v, its result, and 4 bytes for each row of scores."""
    found = {}
    for tokens in (1024, 2048, 4096):
        inputs = heads(tokens=tokens)
        options = dict(causal=True, window=64)
        if name == "packed":
            options = dict(causal=True, cu_seqlens=torch.arange(0, tokens + 1, 256))
        pattern = attention_pattern(inputs[0].transpose(1, 2), **options)
        spared = [] if pattern.cu_seqlens is None else [pattern.cu_seqlens]
        kept = kept_bytes(functools.partial(attend, *inputs, pattern), spared)
        found[tokens] = (kept - (8 if name == "window" else 0)) / tokens  # the ends of one row
    assert set(found.values()) == {4 * (4 * 8 + 2 * 2 * 8 + 4 * 8) + 4 * 4}


@pytest.mark.parametrize("shape", ["llama", "gemma"])
def test_levels(shape):
    """They keep what they keep of a row that is one sequence, and give the same bits."""
    tokens = 64
    sizes = dict(hidden_size=64, features=96, head_dim=16, window=None, kv_heads=2)
    ends = torch.tensor([0, 20, 64])
    found, kept = {}, {}
    for level in LEVELS:
        block, (x, rotation, plain) = block_and_input(
            shape, torch.bfloat16, 1, tokens, save=level, **sizes
        )
        packed = attention_pattern(x, causal=plain.causal, cu_seqlens=ends)
        spared = [*block.parameters(), *(t for t in rotation or () if t is not None)]
        spared.append(packed.cu_seqlens)
        kept[level] = [
            kept_bytes(functools.partial(block, x, rotation, pattern), spared)
            for pattern in (plain, packed)
        ]
        found[level] = gradients(block, (x, rotation, packed))
    for level in LEVELS:
        assert kept[level][0] == kept[level][1], (level, kept)
        assert_same_bits(found[level], found["L0"])


def same_in_a_trace(module, x, *several):
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=len(several) > 1):
        for ends in several:
            found = []
            for each in (compiled, module):
                y = each(x, cu_seqlens=ends)
                grads = torch.autograd.grad(y.sin().sum(), [*module.parameters()])
                found.append([y.detach(), *grads])
            assert_same_bits(*found)


@pytest.mark.parametrize("window", [None, 5])
def test_traces(window):
    """The op is part of them, whatever the ends are, and gives the bits that it gives without."""
    attention = Attention(16, 4, kv_heads=2, window=window)
    same_in_a_trace(attention, torch.randn(2, 24, 16), ENDS, torch.tensor([0, 1, 2, 3, 24]))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["L0", "L3", "L5"])
def test_traces_of_levels(level):
    model = Transformer(TransformerConfig(31, 32, 2, 4, 48, kv_heads=2), save=level)
    same_in_a_trace(model, torch.randint(31, (2, 24)), ENDS)


def test_a_trace_of_what_the_op_does_not_take_makes_a_mask():
    inputs = heads(2, value_size=12)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_close(*both_ways("both", inputs, compiled))


def test_gradients_of_each_sample():
    attention = Attention(16, 4, kv_heads=2, window=3)
    parameters = dict(attention.named_parameters())
    x = torch.randn(3, 1, 24, 16)

    def loss(parameters, x):
        options = {"cu_seqlens": ENDS}
        return torch.func.functional_call(attention, parameters, (x,), options).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for k in range(3):
        wanted = torch.autograd.grad(loss(parameters, x[k]), [*parameters.values()])
        assert_close([each[k] for each in found.values()], wanted)


def test_autocast():
    attention = Attention(16, 4, kv_heads=2, q_norm=headroom.nn.RMSNorm(4))
    x = torch.randn(1, 24, 16)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = attention.split(attention.qkv(x))
        for pattern in PATTERNS.values():
            made = attention_pattern(x, **pattern)
            assert attention.attend(q.float(), k, v, made).dtype == torch.bfloat16


def test_rows_that_are_one_sequence_take_what_they_took():
    q, k, v = heads(2)
    for causal in (True, False):
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        for wide in (None, 24, 100):
            pattern = attention_pattern(q.transpose(1, 2), causal=causal, window=wide)
            assert pattern == Pattern(None, causal)
            assert torch.equal(attend(q, k, v, pattern), wanted)


# ---- Patterns --------------------------------------------------------------------------------


def test_ends_of_rows_that_lie_end_to_end():
    x = torch.empty(2, 10, 4)
    found = attention_pattern(x, causal=True, cu_seqlens=torch.tensor([0, 4, 4, 7]))
    assert found.cu_seqlens.tolist() == [0, 4, 7, 10, 14, 17, 20]
    assert found.cu_seqlens.dtype == torch.int32 and found.longest == 4
    beyond = attention_pattern(x, causal=True, cu_seqlens=torch.tensor([0, 8, 12]))
    assert beyond.cu_seqlens.tolist() == [0, 8, 10, 18, 20] and beyond.longest == 8
    none = attention_pattern(x[:, :0], causal=True, cu_seqlens=torch.tensor([0]))
    assert none.cu_seqlens.tolist() == [0] and none.longest == 0


def test_ends_that_nobody_looks_at():
    """As on a GPU, for which the host would wait, they may hold sequences without tokens."""

    class Far(torch.Tensor):
        pass

    ends = torch.tensor([0, 4, 12]).as_subclass(Far)
    found = attention_pattern(torch.empty(2, 10, 4), causal=True, cu_seqlens=ends)
    assert found.cu_seqlens.tolist() == [0, 4, 10, 10, 14, 20, 20] and found.longest == 10
    assert found.cu_seqlens.dtype == torch.int32


def test_a_mask_with_ends_and_a_window_is_one_mask():
    x = torch.empty(2, 24, 4)
    padding = torch.ones(2, 24)
    padding[1, 20:] = 0
    options = dict(PATTERNS["both"])
    found = attention_pattern(x, mask=padding.long(), **options)
    assert found[1:] == (False, None, None, None)
    wanted = masked(attention_pattern(x, **options), x).mask.clone()
    wanted[1, ..., 20:] = float("-inf")
    assert torch.equal(found.mask, wanted)


def test_no_tokens():
    attention = Attention(16, 4, window=3)
    for ends in (None, torch.tensor([0])):
        assert attention(torch.empty(2, 0, 16), cu_seqlens=ends).shape == (2, 0, 16)


# ---- On a GPU --------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_on_a_gpu(name, dtype):
    """Heads of 8, which FlashAttention takes, or attention by sequence in float32."""
    inputs = [x.detach().cuda().requires_grad_() for x in heads(2, dtype=dtype)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, wanted = both_ways(name, inputs)
    _, true = both_ways(name, exact)
    for a, b, value in zip(got, wanted, true, strict=True):
        rounding = torch.finfo(dtype).eps * value.norm()
        assert (a - value).norm() <= 2 * (b - value).norm() + rounding


# ---- As on a GPU, which need not be here -----------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Takes the CPU for a GPU, with an attention of this signature."""
    from torch.nn.attention import varlen

    calls = []

    def install(knows_groups):
        def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, **more):
            assert cu_seq_q is cu_seq_k and max_q == max_k and set(more) <= {"enable_gqa"}
            assert cu_seq_q.dtype == torch.int32 and cu_seq_q[-1] == len(q)
            assert int(cu_seq_q.diff().max()) <= max_q
            calls.append((max_q, window_size, len(k[0]), more))
            index = torch.arange(len(q))
            sequence = torch.searchsorted(cu_seq_q[1:], index, right=True)
            seen = sequence[:, None] == sequence
            distance = index[:, None] - index
            before, behind = window_size
            seen &= (before < 0) | (distance <= before)
            seen &= (behind < 0) | (distance >= -behind)
            rows = (x.transpose(0, 1)[None] for x in (q, k, v))
            options = {"attn_mask": seen, "scale": scale, "enable_gqa": len(k[0]) < len(q[0])}
            return F.scaled_dot_product_attention(*rows, **options)[0].transpose(0, 1)

        def takes(q, k, v, scale):
            return "cuda" != q.device.type and q.dtype == torch.float32

        monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
        monkeypatch.setattr(flash, "_varlen_takes", takes)
        monkeypatch.setattr(flash, "_varlen_knows", lambda name: knows_groups)
        return calls

    return install


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("knows_groups", [True, False])
def test_varlen_is_told_which_tokens_see_which(name, knows_groups, gpu):
    calls = gpu(knows_groups)
    assert_close(*both_ways(name, heads(2)))
    longest, window, kv_heads, more = calls[0]
    assert longest == (24 if name == "window" else 13)
    causal, width = PATTERNS[name]["causal"], PATTERNS[name].get("window")
    before = -1 if width is None else width - 1
    assert window == (before, 0 if causal else before)
    assert (kv_heads, more) == ((2, {"enable_gqa": True}) if knows_groups else (4, {}))


def test_what_varlen_of_this_torch_takes():
    flash._varlen_arguments.cache_clear()
    assert flash._varlen_knows("scale") and flash._varlen_knows("window_size")
    assert not flash._varlen_knows("mask")


def planned(dtype, device="cuda", **call):
    """The names of the operations of a step on a GPU, and its largest tensor."""
    model = Transformer(TransformerConfig(31, 64, 1, 4, 96, kv_heads=2, head=False)).to(dtype)
    ids = torch.randint(31, (1, 512))
    plan = headroom.plan(
        model, None, {"ids": ids, **call}, device=device,
        forward=lambda model, batch: model(**batch).float().square().mean(),
    )  # fmt: skip
    made = plan.timeline.allocations
    return {a.op for a in made if a.op and "att" in a.op}, max(a.bytes for a in made)


def kernels(found):
    return {name.split("::")[1] for name in found if "::" in name and "weight" not in name}


@pytest.mark.parametrize(
    "dtype, call, kernel",
    [
        (torch.bfloat16, {}, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, {"cu_seqlens": torch.tensor([0, 200, 512])}, "_varlen_attn"),
        (torch.float32, {"cu_seqlens": torch.tensor([0, 200, 512])}, "efficient"),
        (torch.float32, {}, "efficient"),
        (torch.bfloat16, {"mask": torch.ones(1, 512)}, "efficient"),
    ],
    ids=["rows", "packed", "packed in 32 bits", "rows in 32 bits", "masked"],
)
def test_no_kernel_keeps_all_probabilities(dtype, call, kernel):
    """Neither a mask nor float32 sends grouped heads to products of all pairs."""
    found, largest = planned(dtype, **call)
    if kernel == "efficient":
        kernel = "_scaled_dot_product_efficient_attention"
    assert kernels(found) == {kernel, f"{kernel}_backward"}
    if "mask" not in call:
        assert largest < 4 * 512 * 512 * dtype.itemsize  # all pairs
