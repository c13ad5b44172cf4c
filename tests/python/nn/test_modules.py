"""Modules beside torch's, and attention beside a formula that looks at every pair of tokens."""

from __future__ import annotations

import copy
import dataclasses

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
    ends = torch.zeros(3, dtype=torch.int32, device="meta")  # nobody looks where they are
    for logits in (model(ids), model(ids, cu_seqlens=ends, position_ids=ids)):
        assert logits.shape == (2, 8, 31) and logits.is_meta
    options = {"device": "meta", "dtype": torch.bfloat16}
    norms = {"attention_norm": RMSNorm(16, **options), "mlp_norm": LayerNorm(16, **options)}
    block = Block(Attention(16, 4, qkv_bias=True, **options), MLP(16, 8, **options), norms)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in block.parameters())
    assert len(list(block.parameters())) == 8


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


def test_what_modules_say_of_themselves():
    norms = {"attention_norm": RMSNorm(16, 1e-3), "mlp_norm": LayerNorm(16, bias=False)}
    attention = Attention(16, 4, kv_heads=2, head_dim=6, causal=False, window=3, dropout=0.5)
    mlp = MLP(16, 24, activation="relu", gated=False, bias=True)
    block = Block(attention, mlp, norms, dropout=0.25, save="L3")
    lines = [line.strip() for line in repr(block).splitlines()]
    assert lines == [
        "Block(",
        "layout=pre, dropout=0.25, save=L3",
        "(attention): Attention(",
        "heads=4, kv_heads=2, head_dim=6, causal=False, window=3, dropout=0.5",
        "(qkv): Linear(in_features=16, out_features=48, bias=False)",
        "(out): Linear(in_features=24, out_features=16, bias=False)",
        ")",
        "(mlp): MLP(",
        "activation=relu, gated=False",
        "(up): Linear(in_features=16, out_features=24, bias=True)",
        "(down): Linear(in_features=24, out_features=16, bias=True)",
        ")",
        "(attention_norm): RMSNorm((16,), eps=0.001, elementwise_affine=True)",
        f"(mlp_norm): LayerNorm({nn.LayerNorm(16, bias=False).extra_repr()})",
        ")",
    ]
    plain = MLP(4, 6)
    assert (plain.activation, plain.gated) == ("silu", True)
    assert plain.gate_up.weight.shape == (12, 4) and plain.down.weight.shape == (4, 6)
    assert plain.gate_up.bias is None is plain.down.bias and not hasattr(plain, "up")
    norm = RMSNorm(3)
    assert (norm.eps, norm.offset, norm.casting) == (None, 0.0, "once")
    assert norm.epsilon == torch.finfo(torch.float32).eps
    assert RMSNorm(3, elementwise_affine=False).weight is None
    assert LayerNorm(3).eps == 1e-5 and LayerNorm(3, bias=False).bias is None
    default = Attention(16, 4)
    assert (default.causal, default.window, default.scale, default.dropout) == (True, None, None, 0)
    assert (default.rotary_dim, default.interleaved) == (None, False)
    assert (default.heads, default.kv_heads, default.head_dim) == (4, 4, 4)
    made = Block(attention, MLP(16, 24), norms)
    assert (made.layout, made.dropout, made.save) == ("pre", 0.0, "L0")


# ---- Transformer ---------------------------------------------------------------------------------

SIZES = dict(vocab_size=30, hidden_size=16, layers=2, heads=2, features=24)


@pytest.mark.parametrize("layout", ["pre", "sandwich", "parallel"])
def test_a_config_reaches_its_modules(layout):
    config = TransformerConfig(
        30, 16, 3, 4, 24, kv_heads=2, head_dim=6, layout=layout, norm_eps=1e-3, norm_offset=1.0,
        norm_casting="once", activation="relu", gated=False, qkv_bias=True, head_bias=True,
        qk_norm=True, causal=False, window=5, window_layers=(True, False, True),
        attention_scale=0.3, max_positions=9, rotary_dim=4, rope_interleaved=True, token_types=2,
        embedding_norm=True, embedding_scale=2.0, dropout=0.1, attention_dropout=0.2,
        embedding_dropout=0.3, save="L2",
    )  # fmt: skip
    model = Transformer(config, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    per_block = {"pre": 2, "sandwich": 4, "parallel": 1}[layout]
    assert len(norms) == 2 + 3 * (2 + per_block)
    assert {(n.eps, n.offset, n.casting) for n in norms} == {(1e-3, 1.0, "once")}
    for block, window in zip(model.blocks, (5, None, 5)):
        attention, mlp = block.attention, block.mlp
        assert (block.layout, block.dropout, block.save) == (layout, 0.1, "L2")
        assert (attention.window, attention.causal, attention.scale) == (window, False, 0.3)
        assert (attention.dropout, attention.rotary_dim, attention.interleaved) == (0.2, 4, True)
        assert attention.qkv.weight.shape == (48, 16) and attention.out.weight.shape == (16, 24)
        assert attention.qkv.bias is not None and attention.out.bias is None
        assert attention.q_norm.normalized_shape == attention.k_norm.normalized_shape == (6,)
        assert (mlp.activation, mlp.gated, mlp.up.bias) == ("relu", False, None)
    embedding = model.embedding
    assert embedding.types.weight.shape == (2, 16) and embedding.positions is None
    assert (embedding.scale, embedding.dropout) == (2.0, 0.3)
    assert model.head.bias is not None and model.head.weight is not embedding.tokens.weight
    other = Transformer(
        TransformerConfig(
            30, 16, 1, 4, 24, norm="layer", norm_eps=1e-3, out_bias=True, mlp_bias=True,
            positions="learned", max_positions=9, final_norm=False, tied=True,
        )
    )  # fmt: skip
    assert other.norm is None and other.embedding.norm is None and other.embedding.types is None
    assert other.embedding.positions.weight.shape == (9, 16)
    assert other.head.weight is other.embedding.tokens.weight and other.head.bias is None
    (block,) = other.blocks
    assert type(block.mlp_norm) is LayerNorm and block.mlp_norm.eps == 1e-3
    assert block.attention.out.bias is not None and block.attention.qkv.bias is None
    assert block.mlp.gate_up.bias is not None and block.mlp.down.bias is not None
    assert block.attention.q_norm is None and (block.dropout, block.save) == (0.0, "L0")
    assert Transformer(TransformerConfig(**SIZES, head=False)).head is None


def test_defaults_of_a_config():
    """Those of Llama."""
    config = dataclasses.asdict(TransformerConfig(**SIZES))
    assert config == SIZES | dict(
        kv_heads=2, head_dim=8, layout="pre", norm="rms", norm_eps=1e-6, norm_offset=0.0,
        norm_casting="llama", activation="silu", gated=True, qkv_bias=False, out_bias=False,
        mlp_bias=False, head_bias=False, qk_norm=False, causal=True, window=None,
        window_layers=None, attention_scale=None, positions="rope", max_positions=2048,
        rope_base=10000.0, rope_scaling=None, rotary_dim=None, rope_interleaved=False,
        window_rope_base=None, token_types=0, embedding_norm=False, embedding_scale=None,
        final_norm=True, head=True, tied=False, dropout=0.0, attention_dropout=0.0,
        embedding_dropout=0.0, save="L0",
    )  # fmt: skip


def test_embeddings_are_a_sum():
    config = TransformerConfig(
        **SIZES, positions="learned", max_positions=9, token_types=2, embedding_scale=3.0,
        embedding_norm=True, norm="layer", embedding_dropout=0.5,
    )  # fmt: skip
    embedding = Transformer(config).embedding
    ids, types = torch.randint(30, (2, 5)), torch.tensor([[0, 1, 1, 0, 1]] * 2)
    places = torch.tensor([[3, 1, 4, 1, 5]])
    torch.manual_seed(2)
    found = embedding(ids, places, types)
    x = embedding.tokens.weight[ids] * 3 + embedding.types.weight[types]
    x = F.layer_norm(x + embedding.positions.weight[places], (16,), eps=1e-6)
    torch.manual_seed(2)
    assert_close(found, F.dropout(x, 0.5))
    embedding.eval()
    x = embedding.tokens.weight[ids] * 3 + embedding.types.weight[0]
    x = F.layer_norm(x + embedding.positions.weight[:5], (16,), eps=1e-6)
    assert_close(embedding(ids), x)


def test_levels_of_a_model():
    model = Transformer(TransformerConfig(**SIZES, save="L1"))
    assert model.save == ["L1", "L1"]
    model.save = ("L2", "L5")
    assert [block.save for block in model.blocks] == ["L2", "L5"] == model.save
    assert Transformer(TransformerConfig(**SIZES, save="L1"), save="L4").save == ["L4", "L4"]
    with pytest.raises(ValueError, match="save has 3 levels, wanted one, or one for each of the 2"):
        model.save = ["L0"] * 3
    with pytest.raises(ValueError, match="save is 'L6', wanted one of L0, L1, L2, L3, L4, L5"):
        model.save = "L6"


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
    with pytest.raises(ValueError, match="RMSNorm: normalized_shape is 0, wanted the size of one"):
        RMSNorm(0)
    with pytest.raises(ValueError, match="LayerNorm: normalized_shape is .1, 1., wanted the size"):
        LayerNorm((1, 1))
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
