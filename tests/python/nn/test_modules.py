"""Modules beside torch's, and attention beside a formula that looks at every pair of tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import rope_tables
from headroom.nn import (
    MLP,
    Attention,
    Block,
    LayerNorm,
    Pattern,
    RMSNorm,
    Rotation,
    Transformer,
    TransformerConfig,
    attention_pattern,
)
from torch import nn


def assert_close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)


# ---- Norms and MLP -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ours, theirs, options",
    [
        (RMSNorm, nn.RMSNorm, {}),
        (RMSNorm, nn.RMSNorm, dict(eps=1e-3, elementwise_affine=False)),
        (LayerNorm, nn.LayerNorm, {}),
        (LayerNorm, nn.LayerNorm, dict(bias=False)),
        (LayerNorm, nn.LayerNorm, dict(eps=1e-3, elementwise_affine=False)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_torch(ours, theirs, options, dtype):
    mine, other = ours((24,), dtype=dtype, **options), theirs((24,), dtype=dtype, **options)
    for name, p in other.named_parameters():
        assert torch.equal(mine.get_parameter(name), p)
        p.data.normal_(1.0)
    mine.load_state_dict(other.state_dict())
    x = torch.randn(3, 5, 24, dtype=dtype)

    def results(norm, x):
        x = x.clone().requires_grad_()
        y = norm(x)
        return [y, *torch.autograd.grad(y.sin().sum(), [x, *norm.parameters()])]

    exact = results(copy.deepcopy(other).double(), x.double())
    for got, wanted, true in zip(results(mine, x), results(other, x), exact):
        off = (wanted - true).norm()
        assert (got - true).norm() <= 2 * off + true.norm() * 2**-24


def test_norms_of_gemma():
    norm = RMSNorm(8, 1e-6, offset=1.0)
    assert not norm.weight.any()
    x = torch.randn(3, 8)
    assert_close(norm(x), F.rms_norm(x, (8,), eps=1e-6))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu_squared"])
def test_mlp(gated, activation):
    mlp = MLP(8, 12, activation=activation, gated=gated, bias=True)
    act = {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu_squared": lambda x: F.relu(x).square(),
    }[activation]
    x = torch.randn(2, 3, 8)
    first = mlp.first(x)
    inner = act(first[..., :12]) * first[..., 12:] if gated else act(first)
    assert_close(mlp(x), mlp.down(inner))


# ---- Attention -----------------------------------------------------------------------------------


def reference(attention, x, seen):
    """With probabilities of all pairs; ``seen(batch, head, query, key)`` is a bool, or what is
    added to the score."""
    q, k, v = (
        attention.qkv(x)
        .unflatten(-1, (-1, attention.head_dim))
        .split([attention.heads, attention.kv_heads, attention.kv_heads], dim=-2)
    )
    group = attention.heads // attention.kv_heads
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    out = torch.zeros_like(q)
    batch, tokens, heads, _ = q.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(tokens):
                scores = k[b, :, h // group] @ q[b, i, h] * scale
                for j in range(tokens):
                    look = seen(b, h, i, j)
                    if look is False:
                        scores[j] = float("-inf")
                    elif look is not True:
                        scores[j] += look
                out[b, i, h] = scores.softmax(0) @ v[b, :, h // group]
    return attention.out(out.flatten(-2))


TOKENS = 7
ADDED = torch.randn(2, 4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)
CASES = {
    "causal": ({}, {}, lambda b, h, i, j: j <= i),
    "all": ({"causal": False}, {}, lambda *_: True),
    "window": ({"window": 3}, {}, lambda b, h, i, j: i - 3 < j <= i),
    "both_ways": ({"causal": False, "window": 3}, {}, lambda b, h, i, j: abs(i - j) < 3),
    "wide": ({"window": 70}, {}, lambda b, h, i, j: j <= i),
    "padding": ({}, {"mask": PADDING}, lambda b, h, i, j: j <= i and bool(PADDING[b, j])),
    "added": (
        {"causal": False, "scale": 0.2},
        {"mask": ADDED},
        lambda b, h, i, j: ADDED[b, h, i, j],
    ),
    "added_causal": (
        {"window": 4},
        {"mask": ADDED[0, 0][None]},
        lambda b, h, i, j: i - 4 < j <= i and ADDED[0, 0, i, j],
    ),
    "packed": (
        {},
        {"cu_seqlens": ENDS},
        lambda b, h, i, j: j <= i and (i < 3) == (j < 3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_sees_whom(case):
    options, inputs, seen = CASES[case]
    attention = Attention(16, 4, kv_heads=2, head_dim=6, qkv_bias=True, out_bias=True, **options)
    x = torch.randn(2, TOKENS, 16)
    with torch.no_grad():
        assert_close(attention(x, **inputs), reference(attention, x, seen))


def test_as_many_sequences_as_tokens():
    """A mask [batch, tokens] says which tokens are seen by all, whatever the sizes are."""
    attention = Attention(16, 4)
    x = torch.randn(3, 3, 16)
    padding = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    with torch.no_grad():
        wanted = reference(attention, x, lambda b, h, i, j: j <= i and bool(padding[b, j]))
        assert_close(attention(x, mask=padding), wanted)
        pairs = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]])
        wanted = reference(attention, x, lambda b, h, i, j: bool(pairs[i, j]))
        assert_close(attention(x, mask=pairs[None, None]), wanted)
    with pytest.raises(
        ValueError, match=r"mask is \[3, 3\], wanted \[batch, tokens\], .* \[2, 3\]"
    ):
        attention(x[:2], mask=pairs)


def test_training_after_an_evaluation_in_inference_mode():
    model = Transformer(TransformerConfig(31, 32, 2, 4, 48), save="L1")
    ids = torch.randint(31, (2, 8))
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()
    assert model.embedding.tokens.weight.grad.isfinite().all()


@pytest.mark.parametrize("layout", ["pre", "post"])
def test_shapes_alone_on_the_meta_device(layout):
    config = TransformerConfig(31, 32, 2, 4, 48, layout=layout, save="L3", window=3)
    model = Transformer(config, device="meta")
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    logits = model(ids)
    assert logits.shape == (2, 8, 31) and logits.is_meta


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dropout=-0.1), "dropout is -0.1, wanted a probability from 0 to 1"),
        (dict(attention_dropout=1.5), "attention_dropout is 1.5, wanted a probability"),
        (dict(embedding_dropout=2), "embedding_dropout is 2, wanted a probability"),
        (dict(window=0), "window is 0, wanted at least 1"),
        (dict(heads=0), "heads is 0, wanted at least 1"),
        (dict(kv_heads=3), r"kv_heads is 3, wanted a divisor of heads \(4\)"),
        (dict(kv_heads=0), "kv_heads is 0, wanted at least 1"),
        (dict(head_dim=0), "head_dim is 0, wanted at least 1"),
        (dict(features=-1), "features is -1, wanted at least 1"),
        (dict(layers=-1), "layers is -1 and token_types is 0, wanted at least 0"),
    ],
)
def test_sizes_and_probabilities_that_cannot_be(options, message):
    shape = dict(vocab_size=31, hidden_size=32, layers=2, heads=4, features=48)
    with pytest.raises(ValueError, match=f"TransformerConfig: {message}"):
        TransformerConfig(**shape | options)


def test_attention_and_blocks_check_too():
    with pytest.raises(ValueError, match="Attention: window is 0, wanted at least 1"):
        Attention(16, 4, window=0)
    with pytest.raises(ValueError, match="Attention: dropout is 2, wanted a probability"):
        Attention(16, 4, dropout=2)
    norms = {"attention_norm": RMSNorm(16), "mlp_norm": RMSNorm(16)}
    with pytest.raises(ValueError, match="Block: dropout is -1, wanted a probability"):
        Block(Attention(16, 4), MLP(16, 24), norms, dropout=-1)


@pytest.mark.parametrize("level", ["L0", "L3", "L5"])
def test_dropout_of_everything(level):
    norms = {"attention_norm": RMSNorm(16), "mlp_norm": RMSNorm(16)}
    block = Block(Attention(16, 4), MLP(16, 24), norms, dropout=1.0, save=level)
    x = torch.randn(2, 5, 16, requires_grad=True)
    y = block(x)
    assert torch.equal(y, x)
    (y * y.detach()).sum().backward()
    assert torch.equal(x.grad, x)
    assert not block.mlp.down.weight.grad.any()


@pytest.mark.parametrize("scaling", [None, dict(rope_type="dynamic", factor=2.0)])
def test_positions_beyond_those_of_the_config(scaling):
    sizes = dict(vocab_size=31, hidden_size=32, layers=2, heads=4, features=48)
    shape = TransformerConfig(**sizes, max_positions=8, rope_scaling=scaling)
    model = Transformer(shape)
    ids = torch.randint(31, (2, 20))
    with torch.no_grad():
        wanted = model(ids)
        model._tables.clear()
        assert_close(model(ids, position_ids=torch.arange(20)), wanted)
        if scaling is None:  # rotations tell distances alone
            far = model(ids[:, :4], position_ids=torch.arange(50, 54))
            assert_close(far, wanted[:, :4])
            assert_close(model(ids), wanted)
            assert_close(model(ids[:, :3]), wanted[:, :3])


@pytest.mark.parametrize("called_before", [False, True])
def test_few_traces_for_many_lengths(called_before):
    model = Transformer(TransformerConfig(31, 32, 2, 4, 48), save="L2")
    traces = []

    def backend(graph, _):
        traces.append(graph)
        return graph

    torch._dynamo.reset()
    if called_before:
        model(torch.randint(31, (2, 40)))
    options = {"dynamic": True} if called_before else {}
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    for tokens in (8, 9, 12, 20):
        ids = torch.randint(31, (2, tokens))
        assert_close(compiled(ids), model(ids))
    assert len(traces) == (1 if called_before else 2)  # the first is of one length


def test_torch_chooses_the_backend():
    attention = Attention(16, 4, kv_heads=2)
    heads = attention.split(attention.qkv(torch.randn(2, 5, 16)))
    assert "FlashAttention" in attention.attend(*heads, Pattern(None, True)).grad_fn.name()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "FlashAttention" not in attention.attend(*heads, Pattern(None, True)).grad_fn.name()


def test_queries_and_keys_are_normalized_and_rotated():
    norms = RMSNorm(6, 1e-6), RMSNorm(6, 1e-6)
    attention = Attention(16, 4, kv_heads=2, head_dim=6, q_norm=norms[0], k_norm=norms[1])
    norms[0].weight.data.normal_()
    x = torch.randn(2, 5, 16)
    cos, sin = rope_tables(6, 9)
    ids = torch.tensor([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]])
    q, k, v = attention.split(attention.qkv(x), *Rotation(cos, sin, ids))
    packed = attention.qkv(x).unflatten(-1, (-1, 6)).transpose(1, 2)
    assert_close(v, packed[:, 6:])
    for got, part, norm in ((q, packed[:, :4], norms[0]), (k, packed[:, 4:6], norms[1])):
        part = F.rms_norm(part, (6,), norm.weight, 1e-6)
        c, s = (t[ids][:, None] for t in (cos, sin))
        first, second = part.chunk(2, -1)
        assert_close(got, torch.cat([first * c - second * s, second * c + first * s], -1))


# ---- Transformer ---------------------------------------------------------------------------------

SIZES = dict(vocab_size=30, hidden_size=16, layers=2, heads=2, features=24)


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_packed_sequences_are_sequences(positions):
    model = Transformer(TransformerConfig(**SIZES, positions=positions, save="L2"))
    ids = torch.randint(30, (1, 9))
    ends = torch.tensor([0, 4, 9])
    packed = model(ids, cu_seqlens=ends)
    apart = torch.cat([model(ids[:, :4]), model(ids[:, 4:])], dim=1)
    assert_close(packed, apart)


def test_positions_may_be_given():
    model = Transformer(TransformerConfig(**SIZES, max_positions=64))
    ids = torch.randint(30, (2, 5))
    shifted = torch.arange(5) + torch.tensor([[0], [40]])
    assert_close(model(ids, position_ids=shifted), model(ids))  # only distances matter


def test_compile():
    sizes = SIZES | {"layers": 1}
    model = Transformer(TransformerConfig(**sizes, tied=True, save="L3"))
    ids = torch.randint(30, (2, 5))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for call in (compiled, model):
        call(ids).square().sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        if call is compiled:
            wanted = got
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_bad_arguments():
    with pytest.raises(ValueError, match="normalized_shape is .2, 3., wanted the size of one dim"):
        RMSNorm((2, 3))
    with pytest.raises(ValueError, match="casting is 'twice', wanted one of once"):
        RMSNorm(3, casting="twice")
    with pytest.raises(ValueError, match="activation is 'swish', wanted one of silu"):
        MLP(4, 6, activation="swish")
    with pytest.raises(ValueError, match="kv_heads is 3, wanted a divisor of heads .4."):
        Attention(16, 4, kv_heads=3)
    with pytest.raises(ValueError, match="hidden_size is 15, wanted a multiple of heads .4., or"):
        Attention(15, 4)
    with pytest.raises(ValueError, match="layout is 'before', wanted one of pre, post"):
        Block(Attention(4, 1), MLP(4, 6), {}, layout="before")
    with pytest.raises(ValueError, match="norms are mlp_norm, wanted attention_norm, mlp_norm"):
        Block(Attention(4, 1), MLP(4, 6), {"mlp_norm": RMSNorm(4)})
    with pytest.raises(ValueError, match="norm is 'batch', wanted one of rms, layer"):
        TransformerConfig(**SIZES, norm="batch")
    with pytest.raises(ValueError, match="window_layers has 1 entries, wanted one for each of"):
        TransformerConfig(**SIZES, window_layers=(True,))
    with pytest.raises(ValueError, match="hidden_size is 15, wanted a multiple of heads .2., or"):
        TransformerConfig(**SIZES | {"hidden_size": 15})


@pytest.mark.parametrize("ends", [[0, 5, 3, 7], [1, 3, 7], [7, 3, 0]])
def test_ends_of_sequences_that_are_no_ends_are_refused(ends):
    with pytest.raises(ValueError, match="cu_seqlens is .*cumulative sum of the lengths"):
        attention_pattern(torch.ones(1, 7, 4), causal=True, cu_seqlens=torch.tensor(ends))
