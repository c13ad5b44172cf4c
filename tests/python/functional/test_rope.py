"""The op headroom::rope against its formula in float64 and what transformers computes."""

import functools

import pytest
import torch
from headroom.functional import rope, rope_tables
from torch.utils.checkpoint import checkpoint

from helpers.rope_scalings import SCALINGS
from helpers.row_values import DTYPES, assert_as_good


def sample(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def by_position(table, positions):
    """[batch or 1, 1, tokens, pairs], for heads before tokens."""
    return table[positions].reshape(-1, 1, positions.shape[-1], table.shape[-1])


def reference(x, cos, sin, interleaved=False):
    """Rotates x [batch, heads, tokens, dim] as complex numbers, by tables that broadcast."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    halves = turned.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    dim = -1 if interleaved else -2
    numbers = torch.complex(*(part.contiguous() for part in halves.unbind(dim)))
    result = numbers * torch.complex(cos, sin)
    return torch.cat((torch.stack((result.real, result.imag), dim).flatten(-2), rest), -1)


def of_models(q, k, cos, sin):
    """What transformers' models compute, each operation rounded to the dtype of q."""

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    return turned(q), turned(k)


def gradients(function, q, k, dq, dk):
    q, k = (t.detach().clone().requires_grad_() for t in (q, k))
    outs = function(q, k)
    torch.autograd.backward(outs, (dq, dk))
    return *outs, q.grad, k.grad


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
@pytest.mark.parametrize("rotary", (None, 32, 20), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, rotary, interleaved, device):
    q, dq = (sample((2, 6, 21, 64), dtype, device, seed) for seed in (0, 1))
    k, dk = (sample((2, 2, 21, 64), dtype, device, seed) for seed in (2, 3))
    cos, sin = rope_tables(64, 40, rotary_dim=rotary, device=device)
    ids = torch.randint(0, 40, (2, 21), device=device)
    wide = {"cos": by_position(cos, ids).double(), "sin": by_position(sin, ids).double()}
    exact = gradients(
        lambda *qk: tuple(reference(x, **wide, interleaved=interleaved) for x in qk),
        *(t.double() for t in (q, k, dq, dk)),
    )
    narrow = {name: table.to(dtype) for name, table in wide.items()}
    theirs = [
        reference(t.float(), narrow["cos"].float(), s * narrow["sin"].float(), interleaved).to(
            dtype
        )
        for t, s in ((q, 1), (k, 1), (dq, -1), (dk, -1))
    ]
    ours = functools.partial(
        rope, cos=cos, sin=sin, position_ids=ids, interleaved=interleaved, rotary_dim=rotary
    )
    got = gradients(ours, q, k, dq, dk)
    assert [t.dtype for t in got] == [dtype] * 4
    assert_as_good(got, theirs, exact, dtype)
    if rotary is not None:
        assert all(torch.equal(t[..., rotary:], x[..., rotary:]) for t, x in zip(got, (q, k, dq)))


def test_bits_of_models(device):
    """In float32 both round each product and the sum; in 16 bits theirs rounds each, ours once."""
    cos, sin = (torch.cat((t, t), -1)[None, 3:12] for t in rope_tables(64, 20, device=device))
    for dtype in DTYPES:
        q, k = sample((2, 4, 9, 64), dtype, device), sample((2, 2, 9, 64), dtype, device, 1)
        theirs = of_models(q, k, cos.to(dtype), sin.to(dtype))
        exact = of_models(q.double(), k.double(), cos.double(), sin.double())
        got = rope(q, k, cos, sin)
        if dtype == torch.float32:
            assert all(torch.equal(a, b) for a, b in zip(got, theirs))
        for ours, other, value in zip(got, theirs, exact):
            errors = [(t.double() - value).square().mean() for t in (ours, other)]
            assert errors[0] <= errors[1]


@pytest.mark.slow  # the import takes seconds
def test_models_are_those_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cos, sin = (torch.cat((t, t), -1)[None] for t in rope_tables(64, 9))
    q, k = sample((2, 4, 9, 64), torch.float32, "cpu"), sample((2, 2, 9, 64), torch.float32, "cpu")
    for got in (rope(q, k, cos, sin), of_models(q, k, cos, sin)):
        wanted = llama.apply_rotary_pos_emb(q, k, cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted))
    config = llama.LlamaConfig(
        head_dim=64, rope_parameters=SCALINGS["llama3"] | {"rope_theta": 5e5}
    )
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(9)[None])
    ours = rope_tables(64, 9, scaling=config.rope_parameters)
    for got, wanted in zip(ours, (cos, sin)):
        torch.testing.assert_close(got.repeat(1, 2), wanted[0], rtol=0, atol=2e-6)


def test_positions(device):
    cos, sin = rope_tables(16, 30, device=device)
    q, k = (
        sample((3, 4, 7, 16), torch.float32, device),
        sample((3, 2, 7, 16), torch.float32, device),
    )
    ids = torch.arange(5, 12, device=device)
    per_batch = ids + torch.tensor([0, 3, 7], device=device)[:, None]
    expected = rope(q, k, cos, sin, offset=5)
    per_token = (torch.cat((t[ids], t[ids]), -1)[None] for t in (cos, sin))
    ways = {
        "[tokens]": rope(q, k, cos, sin, position_ids=ids),
        "[1, tokens]": rope(q, k, cos, sin, position_ids=ids[None]),
        "expanded": rope(q, k, cos, sin, position_ids=ids.expand(3, 7)),
        "strided": rope(q, k, cos, sin, position_ids=ids[:, None].repeat(1, 3).t()),
        "every second": rope(q, k, cos, sin, position_ids=ids.repeat_interleave(2)[::2]),
        "tables per token": rope(q, k, *per_token),
        "tables of both halves": rope(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1),
                                      offset=5),
        "tables with gaps": rope(q, k, cos.repeat(1, 2)[:, :8], sin.t().contiguous().t(), offset=5),
        "explicit": rope(q, k, cos, sin, offset=5, rotary_dim=16),
    }  # fmt: skip
    for name, got in ways.items():
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), name
    for b in range(3):
        one = rope(q[b], k[b], cos, sin, position_ids=per_batch[b])
        every = rope(q, k, cos, sin, position_ids=per_batch)
        per_token = (t[per_batch].repeat(1, 1, 2) for t in (cos, sin))
        tables = rope(q, k, *per_token)
        assert all(torch.equal(x, y[b]) for x, y in zip(one, every))
        assert all(torch.equal(x, y) for x, y in zip(tables, every))


def test_layouts_keep_their_memory_order(device):
    """Transposed views, slices of a packed product, expanded and strided tensors."""
    cos, sin = rope_tables(24, 9, device=device)
    q, k = (
        sample((2, 9, 6, 24), torch.bfloat16, device),
        sample((2, 9, 2, 24), torch.bfloat16, device),
    )
    expected = [t.transpose(1, 2) for t in rope(q, k, cos, sin, token_major=True)]
    packed = torch.cat((q.flatten(2), k.flatten(2), k.flatten(2)), -1)
    parts = [t.unflatten(-1, (-1, 24)).transpose(1, 2) for t in packed.split((144, 48, 48), -1)]
    turned = [t.permute(3, 2, 1, 0).contiguous().permute(3, 1, 2, 0) for t in (q, k)]
    odd = [torch.empty(t.numel() + 1, dtype=t.dtype, device=device)[1:].view(t.shape).copy_(t)
           for t in (q, k)]  # fmt: skip
    for pair in (
        (q.transpose(1, 2), k.transpose(1, 2)),
        (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()),
        parts[:2],
        turned,
        [t.transpose(1, 2) for t in odd],
    ):
        leaves = [t.detach().requires_grad_() for t in pair]
        got = rope(*leaves, cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        sum(t.float().sum() for t in got).backward()  # the gradients are expanded from one element
        plain = [t.detach().clone().requires_grad_() for t in expected]
        torch.autograd.backward(rope(*plain, cos, sin), [torch.ones_like(t) for t in plain])
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, plain))
    assert rope(q.transpose(1, 2), None, cos, sin).stride() == q.transpose(1, 2).stride()
    for shape in ((0, 6, 9, 24), (2, 6, 0, 24), (2, 0, 9, 24)):
        empty = torch.empty(shape, device=device, requires_grad=True)
        rope(empty, None, cos, sin).sum().backward()
        assert empty.grad.shape == shape


def arguments_of_op(device):
    cos, sin = rope_tables(16, 8, device=device)
    q, k = (sample((2, h, 5, 16), torch.float32, device).requires_grad_() for h in (4, 2))
    ids = torch.arange(5, device=device)[None]
    wide = [t[None, :5].repeat(1, 1, 2) for t in (cos, sin)]
    return {
        "offset": (q, k, cos, sin, None, 3, 16, False, False, False),
        "positions": (q, k, cos, sin, ids, 0, 16, True, False, True),
        "without k": (q.transpose(1, 2), None, *wide, None, 0, 0, False, True, False),
        "strided": (q.transpose(1, 3).contiguous().transpose(1, 3), k.expand(2, 2, 5, 16),
                    *(t[:, :4] for t in (cos, sin)), None, 0, 8, False, False, False),
    }  # fmt: skip


@pytest.mark.parametrize("case", ("offset", "positions", "without k", "strided"))
def test_opcheck(case, device):
    torch.library.opcheck(torch.ops.headroom.rope.default, arguments_of_op(device)[case])


def test_kept_for_backward(device):
    cos, sin = rope_tables(16, 8, device=device)
    q, k = (sample((2, h, 5, 16), torch.bfloat16, device).requires_grad_() for h in (4, 2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope(q, k, cos, sin)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}
    q_out, _ = rope(q, k, cos, sin)
    cos += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q_out.sum().backward()


def test_a_result_that_is_not_used_gives_no_gradient(device):
    cos, sin = rope_tables(16, 8, device=device)
    q, k = (sample((2, h, 5, 16), torch.float32, device).requires_grad_() for h in (4, 2))
    rope(q, k, cos, sin)[1].sum().backward()
    assert q.grad is None and k.grad is not None


def test_ways_to_a_gradient(device):
    cos, sin = rope_tables(16, 8, device=device)
    q, dq = (sample((2, 4, 5, 16), torch.float32, device, seed) for seed in (0, 1))
    k, dk = (sample((2, 2, 5, 16), torch.float32, device, seed) for seed in (2, 3))
    turn = functools.partial(rope, cos=cos, sin=sin)
    expected = gradients(turn, q, k, dq, dk)
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    for function in (
        lambda q, k: checkpoint(turn, q, k, use_reentrant=True),
        lambda q, k: checkpoint(turn, q, k, use_reentrant=False),
        lambda q, k: (turn(q, None), turn(k, None)),
        compiled,
    ):
        for got, wanted in zip(gradients(function, q, k, dq, dk), expected, strict=True):
            assert torch.equal(got, wanted)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert torch.equal(turn(q, k)[0], expected[0])  # as torch's products, it is not autocast
    with torch.inference_mode():
        assert torch.equal(turn(q, k)[1], expected[1])
    only = k.clone().requires_grad_()
    (got,) = torch.autograd.grad(turn(q, only)[1], only, dk)
    assert torch.equal(got, expected[3])
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    (got,) = torch.autograd.grad(turn(*leaves)[0], leaves[:1], dq)
    assert torch.equal(got, expected[2])


def test_compiled_once_for_all_offsets(device):
    cos, sin = rope_tables(16, 64, device=device)
    q = sample((1, 2, 1, 16), torch.float32, device)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(
        lambda q, offset: rope(q, None, cos, sin, offset=offset), backend=backend, fullgraph=True
    )
    for offset in range(2, 12):
        assert torch.equal(step(q, offset), rope(q, None, cos, sin, offset=offset))
    assert len(graphs) <= 2


def test_second_derivative(device):
    cos, sin = (t.to(device) for t in rope_tables(8, 5))
    q = sample((1, 2, 5, 8), torch.float32, device).requires_grad_()
    (grad,) = torch.autograd.grad(rope(q, None, cos, sin).square().sum() / 2, q, create_graph=True)
    torch.testing.assert_close(grad, q)  # a rotation keeps lengths
    (second,) = torch.autograd.grad(grad.sum(), q)
    torch.testing.assert_close(second, torch.ones_like(q))


def test_names_in_a_profile(device):
    cos, sin = rope_tables(8, 5, device=device)
    q = sample((1, 2, 5, 8), torch.float32, device).requires_grad_()
    rope(q, None, cos, sin)
    with torch.profiler.profile() as profile:
        rope(q, None, cos, sin).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"headroom::rope", "headroom::rope_backward"} <= names


BAD = {
    "q has shape \\[5, 8\\]": lambda q, k, c, s: rope(q[0, 0], None, c, s),
    "q has dtype": lambda q, k, c, s: rope(q.double(), None, c, s),
    "k has dtype BFloat16, but q has Float": lambda q, k, c, s: rope(q, k.bfloat16(), c, s),
    "k has shape .* in more than the heads": lambda q, k, c, s: rope(q, k[:, :, :4], c, s),
    "cos has dtype": lambda q, k, c, s: rope(q, k, c.double(), s),
    "sin has another shape or dtype": lambda q, k, c, s: rope(q, k, c, s[:4]),
    "cos has shape \\[4\\]": lambda q, k, c, s: rope(q, k, c[0], s[0]),
    "cos has shape \\[1, 9, 4\\]": lambda q, k, c, s: rope(q, k, c[None], s[None]),
    "cos has 3 columns, wanted rotary_dim \\(8\\) or": lambda q, k, c, s: rope(
        q, k, c[:, :3], s[:, :3], rotary_dim=8
    ),
    "rotary_dim is 10, wanted an even": lambda q, k, c, s: rope(
        q, k, c.repeat(1, 3)[:, :10], s.repeat(1, 3)[:, :10]
    ),
    "rotary_dim is 3, wanted an even": lambda q, k, c, s: rope(
        q, k, c[:, :3], s[:, :3], rotary_dim=3
    ),
    "per token, which leaves no use": lambda q, k, c, s: rope(
        q, k, c[None, :5], s[None, :5], offset=1, rotary_dim=8
    ),
    "position_ids is Int": lambda q, k, c, s: rope(
        q, k, c, s, position_ids=torch.arange(5, device=q.device).int()
    ),
    "position_ids is Long \\[4\\]": lambda q, k, c, s: rope(
        q, k, c, s, position_ids=torch.arange(4, device=q.device)
    ),
    "the last position is offset \\(5\\)": lambda q, k, c, s: rope(q, k, c, s, offset=5),
    "offset is -1": lambda q, k, c, s: rope(q, k, c, s, offset=-1),
    "no derivative with respect to cos and sin": lambda q, k, c, s: rope(
        q, k, c.clone().requires_grad_(), s
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, device):
    cos, sin = rope_tables(8, 9, device=device)
    q, k = (sample((1, h, 5, 8), torch.float32, device) for h in (2, 1))
    before = [t.clone() for t in (q, k, cos, sin)]
    with pytest.raises(RuntimeError, match=message):
        BAD[message](q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip((q, k, cos, sin), before))


def test_a_position_without_a_row(device):
    cos, sin = rope_tables(8, 9, device=device)
    q = sample((1, 2, 5, 8), torch.float32, device)
    ids = torch.tensor([[0, 1, 9, 3, 4]], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"positions\[0\]\[2\] is 9, but cos and sin have"):
            rope(q, None, cos, sin, position_ids=ids)
    else:
        assert rope(q, None, cos, sin, position_ids=ids)[:, :, 2].isnan().all()
