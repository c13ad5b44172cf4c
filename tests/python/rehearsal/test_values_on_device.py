"""Values on the software device: what the CPU gives, with the memory that CUDA's code takes."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.cuda

_HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _on_the_device(runtime):
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cuda().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(v) for v in value)
    return value


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in leaves(v)] if isinstance(value, (list, tuple)) else [value]


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.dtype == b.dtype and torch.equal(a.cpu().nan_to_num(7.0), b.cpu().nan_to_num(7.0))


def x(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def i(high, *shape):
    return torch.randint(high, shape)


def in_place(f):
    """Returns a function that changes its first argument, and returns it."""

    def call(first, *rest):
        first = first.clone()
        f(first, *rest)
        return first

    return call


CALLS = {
    "add": lambda: (torch.add, x(3, 4), x(4)),
    "add number": lambda: (lambda a: a + 2.5, x(3)),
    "add half and number": lambda: (lambda a: a + 2.5, x(3, dtype=torch.half)),
    "add 0-dim half and number": lambda: (lambda a: a * 2.5, x(dtype=torch.half)),
    "add int and number": lambda: (lambda a: a + 2.5, i(5, 3)),
    "number less": lambda: (lambda a: 2 - a, x(3)),
    "number to a power": lambda: (lambda a: 2.0**a, x(3)),
    "remainder number": lambda: (lambda a: a % 3, i(9, 5)),
    "compare number": lambda: (lambda a: a > 0.5, x(5)),
    "0-dim tensor of the CPU": lambda: (lambda a: a * torch.tensor(3.0), x(3)),
    "where number": lambda: (lambda c, a: torch.where(c > 0, a, 0.0), x(3), x(3)),
    "clamp": lambda: (lambda a: a.clamp(-1, 1), x(5)),
    "transposed": lambda: (lambda a: (a.t() + 1).contiguous(), x(3, 4)),
    "expanded": lambda: (lambda a: a.expand(4, 3).exp(), x(1, 3)),
    "every other": lambda: (lambda a: a[:, ::2].clone(), x(3, 6)),
    "empty": lambda: (lambda a: a[:0] + 1, x(3)),
    "complex": lambda: (
        lambda a, b: torch.view_as_real(torch.complex(a, b).conj() * 2),
        x(3),
        x(3),
    ),
    "imag": lambda: (lambda a, b: torch.complex(a, b).conj().imag + 1, x(3), x(3)),
    "sum": lambda: (lambda a: a.sum(1), x(3, 4)),
    "sum bf16": lambda: (lambda a: a.sum(), x(3, 4, dtype=torch.bfloat16)),
    "mean": lambda: (torch.mean, x(9)),
    "var_mean": lambda: (torch.var_mean, x(9)),
    "norm": lambda: (torch.linalg.vector_norm, x(9)),
    "max": lambda: (lambda a: a.max(1), x(3, 4)),
    "topk": lambda: (lambda a: a.topk(2), x(3, 5)),
    "sort": lambda: (lambda a: a.sort(dim=1), x(3, 5)),
    "mode": lambda: (lambda a: a.mode(1), i(3, 4, 6)),
    "median": lambda: (torch.median, x(9)),
    "quantile": lambda: (lambda a: torch.quantile(a, 0.3), x(9)),
    "histc": lambda: (lambda a: torch.histc(a, 4, -1, 1), x(20)),
    "cumsum": lambda: (lambda a: a.cumsum(0), x(5)),
    "cummax": lambda: (lambda a: a.cummax(0), x(5)),
    "logsumexp": lambda: (lambda a: a.logsumexp(1), x(3, 4)),
    "mm": lambda: (torch.mm, x(3, 4), x(4, 5)),
    "mm bf16": lambda: (torch.mm, x(3, 4, dtype=torch.bfloat16), x(4, 5, dtype=torch.bfloat16)),
    "addmm": lambda: (torch.addmm, x(5), x(3, 4), x(4, 5)),
    "bmm": lambda: (torch.bmm, x(2, 3, 4), x(2, 4, 5)),
    "baddbmm": lambda: (torch.baddbmm, x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)),
    "dot": lambda: (torch.dot, x(5), x(5)),
    "mv": lambda: (torch.mv, x(3, 4), x(4)),
    "einsum": lambda: (lambda a, b: torch.einsum("bij,bjk->ik", a, b), x(2, 3, 4), x(2, 4, 5)),
    "linear": lambda: (F.linear, x(3, 4), x(5, 4), x(5)),
    "cat": lambda: (lambda *a: torch.cat(a), x(2, 3), x(1, 3)),
    "stack": lambda: (lambda *a: torch.stack(a), x(3), x(3)),
    "gather": lambda: (lambda a, n: a.gather(1, n), x(3, 4), i(4, 3, 2)),
    "scatter": lambda: (lambda a, n, b: a.scatter(1, n, b), x(3, 4), i(4, 3, 1), x(3, 1)),
    "scatter_add": lambda: (lambda a, n, b: a.scatter_add(1, n, b), x(3, 4), i(4, 3, 2), x(3, 2)),
    "scatter_reduce": lambda: (
        lambda a, n, b: a.scatter_reduce(1, n, b, "amax"),
        x(3, 4),
        i(4, 3, 2),
        x(3, 2),
    ),
    "index": lambda: (lambda a, n: a[n], x(5, 2), i(5, 3)),
    "index mask": lambda: (lambda a: a[a > 0], x(5, 2)),
    "index_put": lambda: (in_place(lambda a, n: a.__setitem__(n, 3.0)), x(5, 2), i(5, 3)),
    "index_put mask": lambda: (in_place(lambda a: a.__setitem__(a > 0, 3.0)), x(5, 2)),
    "index_add": lambda: (lambda a, n, b: a.index_add(0, n, b), x(5, 2), i(5, 3), x(3, 2)),
    "index_select": lambda: (lambda a, n: a.index_select(0, n), x(5, 2), i(5, 3)),
    "index_copy": lambda: (
        lambda a, b: a.index_copy(0, b[1], b[0]),
        x(5, 2),
        [x(2, 2), torch.tensor([0, 3])],
    ),
    "take_along_dim": lambda: (lambda a, n: torch.take_along_dim(a, n, 1), x(3, 4), i(4, 3, 2)),
    "masked_fill": lambda: (lambda a: a.masked_fill(a > 0, -1.0), x(3, 4)),
    "masked_scatter": lambda: (lambda a, b: a.masked_scatter(a > 0, b), x(3, 4), x(12)),
    "masked_select": lambda: (lambda a: a.masked_select(a > 0), x(3, 4)),
    "nonzero": lambda: (lambda a: (a > 0).nonzero(), x(3, 4)),
    "unique": lambda: (lambda a: a.unique(return_inverse=True, return_counts=True), i(4, 9)),
    "unique_consecutive": lambda: (torch.unique_consecutive, i(2, 9)),
    "bincount": lambda: (torch.bincount, i(5, 9)),
    "repeat_interleave": lambda: (torch.repeat_interleave, x(3), torch.tensor([1, 0, 2])),
    "equal": lambda: (torch.equal, x(3), x(3)),
    "allclose": lambda: (torch.allclose, x(3), x(3)),
    "searchsorted": lambda: (torch.searchsorted, torch.arange(5.0), x(3)),
    "bucketize": lambda: (torch.bucketize, x(3), torch.arange(5.0)),
    "roll": lambda: (lambda a: a.roll(1), x(5)),
    "flip": lambda: (lambda a: a.flip(0), x(5)),
    "tril": lambda: (torch.tril, x(4, 4)),
    "diag_embed": lambda: (torch.diag_embed, x(4)),
    "pad": lambda: (lambda a: F.pad(a, (1, 2)), x(3, 4)),
    "pad reflect": lambda: (lambda a: F.pad(a, (1, 2), "reflect"), x(1, 3, 4)),
    "one_hot": lambda: (lambda n: F.one_hot(n, 5), i(5, 3)),
    "arange": lambda: (lambda a: torch.arange(5, device=a.device) + a, x(5)),
    "linspace": lambda: (lambda a: torch.linspace(0, 1, 5, device=a.device) + a, x(5)),
    "eye": lambda: (lambda a: torch.eye(3, device=a.device) @ a, x(3, 2)),
    "tril_indices": lambda: (lambda a: torch.tril_indices(3, 3, device=a.device), x(1)),
    "out": lambda: (lambda a, b: torch.add(a, b, out=torch.empty(0, device=a.device)), x(3), x(3)),
    "out is an input": lambda: (in_place(lambda a, b: torch.mul(a, b, out=a)), x(3), x(3)),
    "itself": lambda: (in_place(lambda a: a.add_(a)), x(3)),
    "part of itself": lambda: (in_place(lambda a: a[1:3].mul_(2.0)), x(4)),
    "fill": lambda: (in_place(lambda a: a.fill_(2.0)), x(3)),
    "zero": lambda: (in_place(lambda a: a[1:].zero_()), x(3)),
    "copy another dtype": lambda: (in_place(lambda a, b: a.copy_(b)), x(3), x(3, dtype=torch.half)),
    "to": lambda: (lambda a: a.to(torch.bfloat16), x(3, 4)),
    "view as bytes": lambda: (lambda a: a.view(torch.uint8) ^ 1, x(4)),
    "foreach add": lambda: (
        lambda *a: torch._foreach_add(a[:2], a[2:], alpha=2),
        x(3),
        x(2),
        x(3),
        x(2),
    ),
    "foreach norm": lambda: (lambda *a: torch._foreach_norm(a), x(3), x(2, 2)),
    "foreach in place": lambda: (in_place(lambda *a: torch._foreach_mul_(a, 3.0)), x(3), x(2)),
    "softmax": lambda: (lambda a: a.softmax(1), x(3, 4)),
    "log_softmax": lambda: (lambda a: a.log_softmax(1), x(3, 4)),
    "softmax of half in f32": lambda: (
        lambda a: torch.softmax(a.float() if a.device.type == "cpu" else a, 1, torch.float32),
        x(3, 4, dtype=torch.half),
    ),
    "layer_norm": lambda: (lambda a, w, b: F.layer_norm(a, (4,), w, b), x(3, 4), x(4), x(4)),
    "group_norm": lambda: (lambda a: F.group_norm(a, 2), x(2, 4, 3)),
    "rms_norm": lambda: (lambda a, w: F.rms_norm(a, (4,), w), x(3, 4), x(4)),
    "batch_norm": lambda: (
        lambda a, m, v: F.batch_norm(a, m.clone(), v.clone(), training=True),
        x(4, 3),
        x(3),
        x(3),
    ),
    "batch_norm evaluated": lambda: (
        lambda a, m, v: F.batch_norm(a, m, v.abs()),
        x(4, 3),
        x(3),
        x(3),
    ),
    "gelu": lambda: (F.gelu, x(9)),
    "silu": lambda: (F.silu, x(9)),
    "logsigmoid": lambda: (F.logsigmoid, x(9)),
    "glu": lambda: (F.glu, x(3, 4)),
    "embedding": lambda: (lambda n, w: F.embedding(n, w), i(5, 2, 3), x(5, 4)),
    "embedding_bag": lambda: (lambda n, w: F.embedding_bag(n, w), i(5, 2, 3), x(5, 4)),
    "embedding_bag sum": lambda: (
        lambda n, w: F.embedding_bag(n, w, mode="sum", padding_idx=1),
        i(5, 2, 3),
        x(5, 4),
    ),
    "embedding_bag max": lambda: (
        lambda n, o, w: F.embedding_bag(n, w, o, mode="max"),
        i(5, 6),
        torch.tensor([0, 2, 2]),
        x(5, 4),
    ),
    "segment_reduce": lambda: (
        lambda a, n: torch.segment_reduce(a, "sum", lengths=n),
        x(5, 2),
        torch.tensor([2, 0, 3]),
    ),
    "cross_entropy": lambda: (F.cross_entropy, x(3, 5), i(5, 3)),
    "cross_entropy smooth": lambda: (
        lambda a, n: F.cross_entropy(a, n, label_smoothing=0.1),
        x(3, 5),
        i(5, 3),
    ),
    "mse": lambda: (F.mse_loss, x(3), x(3)),
    "bce": lambda: (F.binary_cross_entropy_with_logits, x(3), x(3).sigmoid()),
    "kl_div": lambda: (F.kl_div, x(3).log_softmax(0), x(3).softmax(0)),
    "max_pool": lambda: (lambda a: F.max_pool2d(a, 2), x(1, 2, 4, 4)),
    "avg_pool": lambda: (lambda a: F.avg_pool2d(a, 2), x(1, 2, 4, 4)),
    "adaptive pool": lambda: (lambda a: F.adaptive_avg_pool2d(a, 2), x(1, 2, 5, 5)),
    "interpolate": lambda: (
        lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"),
        x(1, 2, 3, 3),
    ),
    "unfold": lambda: (lambda a: F.unfold(a, 2), x(1, 2, 4, 4)),
    "fft": lambda: (lambda a: torch.view_as_real(torch.fft.rfft(a)), x(8)),
    "svd": lambda: (torch.linalg.svdvals, x(4, 3)),
    "qr": lambda: (torch.linalg.qr, x(4, 3)),
    "solve": lambda: (torch.linalg.solve, x(3, 3), x(3, 2)),
    "cholesky": lambda: (
        lambda a: torch.linalg.cholesky(a @ a.t() + torch.eye(3, device=a.device)),
        x(3, 3),
    ),
    "cdist": lambda: (torch.cdist, x(3, 4), x(2, 4)),
    "lerp": lambda: (torch.lerp, x(3), x(3), x(3)),
    "addcdiv": lambda: (torch.addcdiv, x(3), x(3), x(3)),
    "isnan": lambda: (torch.isnan, x(3)),
    "all": lambda: (torch.all, i(2, 3)),
    "atan2": lambda: (torch.atan2, x(3), x(3)),
    "bitwise": lambda: (lambda a: (a << 2) | 1, i(9, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_the_cpu(name):
    f, *arguments = CALLS[name]()
    on_cpu, there = leaves(f(*arguments)), leaves(f(*on_device(arguments)))
    assert len(on_cpu) == len(there)
    assert all(same(a, b) for a, b in zip(on_cpu, there, strict=True)), (on_cpu, there)


CLOSE = {
    "conv2d": lambda: (F.conv2d, x(2, 3, 6, 6), x(4, 3, 3, 3), x(4)),
    "conv2d depthwise": lambda: (
        lambda a, w: F.conv2d(a, w, groups=3),
        x(2, 3, 6, 6),
        x(3, 1, 3, 3),
    ),
    "conv1d": lambda: (F.conv1d, x(2, 3, 6), x(4, 3, 3)),
    "conv3d": lambda: (F.conv3d, x(1, 2, 4, 4, 4), x(3, 2, 2, 2, 2)),
    "conv dilated": lambda: (lambda a, w: F.conv2d(a, w, dilation=2), x(1, 2, 6, 6), x(3, 2, 2, 2)),
    "conv transposed": lambda: (F.conv_transpose2d, x(1, 2, 4, 4), x(2, 3, 3, 3)),
    "rms_norm": lambda: (lambda a, w: F.rms_norm(a, (4,), w), x(3, 4), x(4)),
    "rms_norm alone": lambda: (lambda a: F.rms_norm(a, (3, 4)), x(3, 4)),
    "attention": lambda: (F.scaled_dot_product_attention, *(x(2, 4, 6, 8) for _ in range(3))),
    "attention causal": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        *(x(2, 4, 6, 8) for _ in range(3)),
    ),
    "attention biased": lambda: (
        F.scaled_dot_product_attention,
        *(x(2, 4, 6, 8) for _ in range(3)),
        x(6, 6),
    ),
    "attention grouped": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        x(2, 4, 6, 8),
        x(2, 2, 6, 8),
        x(2, 2, 6, 8),
    ),
    "attention, fewer queries": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        x(2, 4, 3, 8),
        x(2, 4, 6, 8),
        x(2, 4, 6, 8),
    ),
    "log_softmax": lambda: (lambda a: a.log_softmax(-1), x(3, 5)),
    "logsigmoid": lambda: (F.logsigmoid, x(7)),
    "layer_norm": lambda: (lambda a, w, b: F.layer_norm(a, (4,), w, b), x(3, 4), x(4), x(4)),
    "batch_norm": lambda: (lambda a: F.batch_norm(a, None, None, training=True), x(4, 3, 2)),
    "lstm cell": lambda: (_cell(nn.LSTMCell), x(2, 3), x(2, 4), x(2, 4)),
    "gru cell": lambda: (_cell(nn.GRUCell), x(2, 3), x(2, 4)),
}


def _cell(kind):
    cell = kind(3, 4)

    def call(a, *state):
        state = state[0] if len(state) == 1 else state
        return cell.to(a.device)(a, state)

    return call


@pytest.mark.parametrize("name", CLOSE)
def test_gradients_are_those_of_the_cpu(name):
    f, *arguments = CLOSE[name]()
    arguments = [t.requires_grad_() for t in arguments]
    found = []
    for given in (arguments, on_device(arguments)):
        results = leaves(f(*given))
        gradients = torch.autograd.grad(results, given, [torch.ones_like(t) for t in results])
        found.append([t.detach().cpu() for t in (*results, *gradients)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", _HALVES)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_is_near_f32(dtype, causal):
    given = [x(2, 4, 6, 8, dtype=dtype).requires_grad_() for _ in range(3)]
    there = on_device(given)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*there, is_causal=causal)
    wide = [t.detach().float().requires_grad_() for t in given]
    wanted = F.scaled_dot_product_attention(*wide, is_causal=causal)
    out.sum().backward()
    wanted.sum().backward()
    for a, b in ((out, wanted), *((s.grad, t.grad) for s, t in zip(there, wide, strict=True))):
        torch.testing.assert_close(a.detach().cpu().float(), b.detach(), rtol=2e-2, atol=2e-2)


def test_dropout_of_attention_is_drawn_again_in_the_backward_pass():
    for dtype in (torch.half, torch.float32):  # flash, efficient
        q, k, v = (on_device(x(1, 2, 8, 8, dtype=dtype)) for _ in range(3))
        v.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        # It is linear in the values, so that the gradient must give back the output.
        g = torch.randn_like(out)
        (of_v,) = torch.autograd.grad(out, v, g)
        torch.testing.assert_close((of_v * v).sum(), (g * out).sum(), rtol=2e-2, atol=2e-2)


RANDOM = {
    "rand": lambda: (torch.rand(20000, device="cuda"), 0.5, 12**-0.5),
    "randn": lambda: (torch.randn(20000, device="cuda"), 0, 1),
    "dropout": lambda: (F.dropout(torch.ones(20000, device="cuda"), 0.25), 1, 3**-0.5),
    "bernoulli": lambda: (torch.full((20000,), 0.5, device="cuda").bernoulli(), 0.5, 0.5),
    "exponential": lambda: (torch.empty(20000, device="cuda").exponential_(), 1, 1),
    "randint": lambda: (torch.randint(2, (20000,), device="cuda"), 0.5, 0.5),
    "normal": lambda: (torch.normal(3.0, 2.0, (20000,), device="cuda"), 3, 2),
    "poisson": lambda: (torch.poisson(torch.full((20000,), 4.0, device="cuda")), 4, 2),
    "multinomial": lambda: (
        torch.multinomial(torch.ones(2, device="cuda"), 20000, replacement=True),
        0.5,
        0.5,
    ),
    "_fused_dropout": lambda: (
        torch._fused_dropout(torch.ones(20000, device="cuda"), 0.75)[0],
        1,
        3**-0.5,
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_from_the_generator_of_the_device(name):
    cpu = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    first, mean, deviation = RANDOM[name]()
    after = torch.cuda.get_rng_state()
    second = RANDOM[name]()[0]
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(3)
    assert torch.equal(RANDOM[name]()[0], first)
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert abs(first.float().mean().item() - mean) < 0.05
    assert abs(first.float().std().item() - deviation) < 0.05


def test_sparse_tensors_are_made_and_coalesced():
    dense = torch.eye(3)
    assert torch.equal(dense.cuda().to_sparse().cpu().to_dense(), dense)
    table = nn.Embedding(5, 3, sparse=True).cuda()
    table(torch.tensor([1, 2, 1], device="cuda")).sum().backward()
    grad = table.weight.grad.coalesce()
    assert grad.indices().tolist() == [[1, 2]]
    assert grad.values().tolist() == [[2.0] * 3, [1.0] * 3]


def test_whole_numbers_are_counted_in_bins():
    """The CPU has no kernel for them."""
    ids = i(8, 50).to("cuda", torch.int32)
    counts = torch.histc(ids, 8, 0, 7)
    assert counts.dtype == torch.int32 and counts.tolist() == ids.bincount(minlength=8).tolist()


def test_randperm_is_a_permutation():
    assert torch.randperm(50, device="cuda").sort()[0].tolist() == list(range(50))


def test_memory_that_nothing_has_written_is_nan():
    torch.ones(1000, device="cuda")
    assert torch.empty(1000, device="cuda").isnan().all()
    grown = torch.ones(4, device="cuda").resize_(8)
    assert grown[:4].tolist() == [1.0] * 4
    assert grown[4:].isnan().all()


def test_nothing_is_kept():
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        a, w = x(8, 8).cuda().requires_grad_(), x(8, 8).cuda().requires_grad_()
        out = F.cross_entropy(F.layer_norm(F.gelu(a @ w), (8,)), i(8, 8).cuda())
        out.backward()
        torch._foreach_add_([a.data, w.data], 1.0)
        (a > 0).nonzero()
        dead = [weakref.ref(t) for t in (a, w, out)]
        with pytest.raises(RuntimeError) as caught:
            (a + 1) @ torch.ones(3, 3, device="cuda")
        del a, w, out
        assert [r() for r in dead] == [None] * 3
        assert torch.cuda.memory_allocated() == before
        del caught
    finally:
        gc.enable()


def test_an_error_is_that_of_cuda():
    a = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        a + torch.ones(3)
    with pytest.raises(NotImplementedError, match="\"addmm_cuda\" not implemented for 'Long'"):
        torch.ones(2, 2, device="cuda", dtype=torch.long).mm(
            torch.ones(2, 2, device="cuda", dtype=torch.long)
        )
    with pytest.raises(IndexError):
        a.index_select(0, torch.tensor([7], device="cuda"))
    with pytest.raises(NotImplementedError, match="software device cannot compute"):
        torch._weight_int4pack_mm(a[None].bfloat16(), a[None].int(), 32, a[None].bfloat16())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, t):
        b, n, d = t.shape
        q, k, v = self.qkv(self.first(t)).view(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        t = t + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return t + self.mlp(self.second(t))


def losses(device, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(97, 32), Block(32), Block(32), nn.Linear(32, 97))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    found = []
    for _ in range(4):
        tokens = torch.randint(97, (2, 17)).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_a_gpt_learns_as_on_the_cpu(fused):
    assert losses("cuda", fused) == pytest.approx(losses("cpu", fused), abs=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_replayed_step_is_the_eager_step(dropout):
    models, steps = [], []
    inputs, targets = x(4, 8).cuda(), i(3, 4).cuda()

    def step(model, optimizer, given):
        loss = F.cross_entropy(model(given), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 3)
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(model, optimizer, inputs)
        torch.cuda.current_stream().wait_stream(side)
        models.append(model)
        steps.append((model, optimizer))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*steps[0], inputs)
    batches = [x(4, 8) for _ in range(3)]
    torch.cuda.manual_seed(5)
    replayed = []
    for batch in batches:
        inputs.copy_(batch)
        graph.replay()
        replayed.append(loss.item())
    torch.cuda.manual_seed(5)
    assert replayed == [step(*steps[1], batch.cuda()).item() for batch in batches]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
