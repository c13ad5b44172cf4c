"""headroom.linear_cross_entropy against a formula in float64 and what torch has of it."""

import math

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.functional import linear_cross_entropy as ops
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, FEATURES, CLASSES = 53, 19, 211
# How the logits are cut: all at once, in chunks of 13 rows, in tiles of 64 classes.
CUTS = {
    "whole": {},
    "tokens": {"mode": "tokens", "workspace": 13 * CLASSES * 4},
    "vocabulary": {"mode": "vocabulary", "workspace": 1},
}
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum", "bias": True},
    "none": {"reduction": "none", "token_weight": True},
    "weights": {"class_weight": True, "token_weight": True, "z_loss": 0.01, "bias": True},
    "smoothing": {"label_smoothing": 0.1, "class_weight": True},
    "softcap": {"softcap": 8.0, "logit_scale": 0.5},
    "denominator": {"denominator": 17.0, "z_loss": 0.02},
    "all": {
        **{"label_smoothing": 0.2, "softcap": 20.0, "z_loss": 0.01, "logit_scale": 1.5},
        **{"bias": True, "class_weight": True, "token_weight": True},
    },
}


def sample(dtype=torch.float32, device="cpu", rows=(ROWS,), seed=0, size=0.5):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, FEATURES, generator=generator)
    weight = torch.randn(CLASSES, FEATURES, generator=generator) * size
    bias = torch.randn(CLASSES, generator=generator)
    target = torch.randint(0, CLASSES, rows, generator=generator)
    target[..., ::3] = -100
    factors = torch.rand(CLASSES, generator=generator), torch.rand(*rows, generator=generator)
    leaves = [t.to(device, dtype).requires_grad_() for t in (hidden, weight, bias)]
    return leaves, target.to(device), [(t + 0.5).to(device) for t in factors]


def reference(x, w, target, b=None, cw=None, tw=None, eps=0.0, cap=None, zl=0.0, scale=1.0):
    """The losses of rows, then the weights of the two sums that "mean" divides by."""
    z = scale * (x @ w.T + (0 if b is None else b))
    z = z if cap is None else cap * (z / cap).tanh()
    tw = torch.ones(target.shape, device=x.device) if tw is None else tw
    count = torch.where(target == -100, 0.0, tw).to(z.dtype)
    weights = None if cw is None else cw.to(z.dtype)
    flat = z.flatten(0, -2), target.flatten()
    ce = F.cross_entropy(*flat, weights, reduction="none", label_smoothing=eps).view(target.shape)
    of_target = count if cw is None else count * cw[target.clamp(min=0)].to(z.dtype)
    return ce * count, zl * z.logsumexp(-1) ** 2 * count, of_target.sum(), count.sum()


def reduced(parts, reduction="mean", denominator=None):
    ce, zl, weights, count = parts
    if reduction == "none":
        return ce + zl
    if denominator is not None:
        return (ce.sum() + zl.sum()) / denominator
    return ce.sum() + zl.sum() if reduction == "sum" else ce.sum() / weights + zl.sum() / count


def evaluated(leaves, target, factors, options, cut=None):
    """The loss and the gradients, ours if there is a cut, else those of the reference."""
    given = dict(options)
    has_bias, cw, tw = (given.pop(k, False) for k in ("bias", "class_weight", "token_weight"))
    cw, tw = (t if used else None for t, used in zip(factors, (cw, tw)))
    x, w, b = leaves
    if cut is None:
        how = {k: given.pop(k) for k in ("reduction", "denominator") if k in given}
        names = {"label_smoothing": "eps", "softcap": "cap", "z_loss": "zl", "logit_scale": "scale"}
        given = {names[k]: v for k, v in given.items()}
        loss = reduced(reference(x, w, target, b if has_bias else None, cw, tw, **given), **how)
    else:
        loss = headroom.linear_cross_entropy(
            *(x, w, target, b if has_bias else None),
            **{"class_weight": cw, "token_weight": tw} | given | cut,
        )
    wanted = leaves if has_bias else leaves[:2]
    upstream = torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, wanted, upstream.to(loss.dtype))]


def as_float64(leaves):
    return [t.detach().double().requires_grad_() for t in leaves]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, cut, options, device):
    leaves, target, factors = sample(dtype, device)
    got = evaluated(leaves, target, factors, OPTIONS[options], CUTS[cut])
    exact = evaluated(as_float64(leaves), target, factors, OPTIONS[options])
    # Our logits are float32 for all dtypes: their error is that of torch in float32, and one
    # rounding of the gradient, and one of its factor, to the dtype.
    like = evaluated([t.float() for t in leaves], target, factors, OPTIONS[options])
    for k, (ours, theirs, value) in enumerate(zip(got, like, exact, strict=True)):
        unit = torch.finfo(ours.dtype).eps * value.abs().max().item()
        error, limit = ((t.double() - value).abs().max().item() for t in (ours, theirs))
        assert ours.dtype == (torch.float32 if k == 0 else dtype)
        assert error <= 2 * limit + unit, f"result {k}: {error} against {limit}"


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_torch_has_the_same(reduction, device):
    """Arguments of the same name mean the same as in torch.nn.functional.linear_cross_entropy."""
    leaves, target, (cw, _) = sample(device=device)
    x, w, b = leaves
    both = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": -100}
    got = headroom.linear_cross_entropy(x, w, target, b, class_weight=cw, **both)
    if hasattr(F, "linear_cross_entropy"):
        wanted = F.linear_cross_entropy(x, w, target, linear_bias=b, weight=cw, **both)
    else:
        wanted = F.cross_entropy(F.linear(x, w, b), target, cw, **both)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", CUTS)
def test_gradcheck(cut, device):
    leaves, target, _ = sample(device=device, rows=(4,))
    x, w, b = leaves

    def loss(x, w, b):
        return headroom.linear_cross_entropy(x, w, target, b, softcap=5.0, **CUTS[cut])

    def numerically(leaf, step=1e-2):
        slopes = torch.empty_like(leaf)
        for k in range(leaf.numel()):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    before = leaf.view(-1)[k].clone()
                    leaf.view(-1)[k] += sign * step
                    ends.append(loss(x, w, b).double())
                    leaf.view(-1)[k] = before
            slopes.view(-1)[k] = (ends[0] - ends[1]) / (2 * step)
        return slopes

    analytic = torch.autograd.grad(loss(x, w, b), (x, b))
    for leaf, got in zip((x, b), analytic):
        torch.testing.assert_close(got, numerically(leaf), rtol=2e-3, atol=2e-4)


def test_rows_whose_bf16_logits_are_wrong(device):
    """With |z| around 60 a bfloat16 logit is off by up to 0.125."""
    leaves, target, factors = sample(torch.bfloat16, device, size=14.0)
    exact = evaluated(as_float64(leaves), target, factors, {})
    theirs = evaluated(leaves, target, factors, {})
    got = evaluated(leaves, target, factors, {}, {})
    assert (leaves[0].double() @ leaves[1].double().T).abs().max() > 60
    assert (got[0] - exact[0]).abs() < 1e-6 * exact[0] < 1e-3 * (theirs[0] - exact[0]).abs() * 1e6
    for ours, value in zip(got[1:], exact[1:]):
        assert (ours.double() - value).abs().max() < 0.006 * value.abs().max()


def test_sums_over_128_chunks_diverge_only_where_each_is_rounded():
    """A gradient that grows by the same small amount 128 times: in bfloat16 it stands still once
    the amount is less than half of a unit of the sum."""
    torch.manual_seed(0)
    x = torch.rand(128, 4).add(0.5).bfloat16().requires_grad_()
    w = torch.randn(33, 4).mul(0.1).bfloat16().requires_grad_()
    target = torch.zeros(128, dtype=torch.int64)
    cut = {"mode": "tokens", "workspace": 33 * 4}  # one row at a time

    def error(**options):
        (got,) = torch.autograd.grad(
            headroom.linear_cross_entropy(x, w, target, reduction="sum", **cut, **options), w
        )
        leaves = as_float64((x, w))
        (exact,) = torch.autograd.grad(
            F.cross_entropy(leaves[0] @ leaves[1].T, target, reduction="sum"), leaves[1]
        )
        return ((got.double() - exact).abs() / exact.abs()).max().item()

    assert error() < 2**-8 < 2**-6 < error(round_each_chunk=True)


@pytest.mark.parametrize("cut", CUTS)
def test_shifted_targets_and_strides(cut, device):
    leaves, target, (_, tw) = sample(device=device, rows=(3, 11))
    x, w, b = leaves
    x = x.transpose(0, 1).contiguous().transpose(0, 1)  # rows that are not evenly spaced
    got = headroom.linear_cross_entropy(
        x, w.T.contiguous().T, target, b, token_weight=tw, shift=True, **CUTS[cut]
    )
    parts = reference(x[:, :-1], w, target[:, 1:], b, tw=tw[:, 1:])
    torch.testing.assert_close(got, reduced(parts))
    grads = torch.autograd.grad(got, leaves), torch.autograd.grad(reduced(parts), leaves)
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_stats(device):
    leaves, target, _ = sample(device=device, rows=(3, 11))
    x, w, b = leaves
    names = ("lse", "target_logit", "entropy", "argmax", "rank", "accuracy")
    loss, stats = headroom.linear_cross_entropy(x, w, target, b, stats=names)
    z, counts = (x @ w.T + b).detach(), target != -100
    assert loss.requires_grad and not any(stat.requires_grad for stat in stats.values())
    of_target = z.gather(-1, target.clamp(min=0)[..., None])
    wanted = {
        "lse": z.logsumexp(-1),
        "target_logit": of_target[..., 0],
        "entropy": torch.distributions.Categorical(logits=z).entropy(),
    }
    for name, values in wanted.items():
        torch.testing.assert_close(stats[name], torch.where(counts, values, 0.0))
    assert torch.equal(stats["argmax"], torch.where(counts, z.argmax(-1), -1))
    assert torch.equal(stats["rank"], torch.where(counts, (z > of_target).sum(-1), -1))
    torch.testing.assert_close(
        stats["accuracy"], (z.argmax(-1) == target)[counts].float().mean(), rtol=0, atol=1e-7
    )
    with torch.no_grad():
        tiles = headroom.linear_cross_entropy(
            x, w, target, b, mode="vocabulary", workspace=1, stats=names[:4]
        )
    torch.testing.assert_close(tiles[0], loss.detach())
    for name in names[:4]:
        torch.testing.assert_close(tiles[1][name], stats[name])
    shifted = headroom.linear_cross_entropy(x, w, target, b, shift=True, stats=("accuracy",))[1]
    hits = (z.argmax(-1)[:, :-1] == target[:, 1:])[counts[:, 1:]]
    torch.testing.assert_close(shifted["accuracy"], hits.float().mean())


def test_no_row_counts(device):
    leaves, target, _ = sample(device=device)
    x, w, b = leaves
    for rows in (ROWS, 0):
        ignored = torch.full_like(target, -100)[:rows]
        for cut in CUTS.values():
            for empty, wanted in (("zero", 0.0), ("nan", math.nan)):
                loss = headroom.linear_cross_entropy(x[:rows], w, ignored, b, empty=empty, **cut)
                torch.testing.assert_close(loss.item(), wanted, equal_nan=True)
                for grad in torch.autograd.grad(loss, leaves):
                    assert grad.eq(0).all()
            none = headroom.linear_cross_entropy(x[:rows], w, ignored, reduction="none", **cut)
            assert none.eq(0).all() and torch.autograd.grad(none.sum(), w)[0].eq(0).all()


def test_rows_that_are_ignored_are_not_read(device):
    leaves, target, _ = sample(device=device)
    x, w, _ = leaves
    spoiled = x.detach().clone()
    spoiled[target == -100] = math.nan
    spoiled.requires_grad_()
    for cut in CUTS.values():
        got = headroom.linear_cross_entropy(spoiled, w, target, **cut)
        wanted = headroom.linear_cross_entropy(x, w, target, **cut)
        assert torch.equal(got, wanted)
        grads = torch.autograd.grad(got, (spoiled, w)), torch.autograd.grad(wanted, (x, w))
        assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_a_given_denominator_adds_up_micro_batches(device):
    leaves, target, _ = sample(device=device)
    x, w, _ = leaves
    whole = torch.autograd.grad(headroom.linear_cross_entropy(x, w, target), (x, w))
    count = (target != -100).sum().float()
    halves = sum(
        headroom.linear_cross_entropy(x[part], w, target[part], denominator=count)
        for part in (slice(0, 20), slice(20, None))
    )
    for got, wanted in zip(torch.autograd.grad(halves, (x, w)), whole):
        torch.testing.assert_close(got, wanted)


def test_frozen_inputs_and_evaluation_cost_less(device):
    leaves, target, _ = sample(device=device)
    x, w, _ = leaves
    product = 2 * ROWS * FEATURES * CLASSES

    def counted(x, w, backward=True, **options):
        with FlopCounterMode(display=False) as counter:
            loss = headroom.linear_cross_entropy(x, w, target, **options)
            if backward:
                loss.sum().backward()
        return counter.get_total_flops() / product

    assert counted(x, w) == 3
    assert counted(x, w.detach()) == 2
    assert counted(x, w, reduction="none") == 4
    with torch.no_grad():
        assert counted(x, w, backward=False) == 1
    whole = torch.autograd.grad(headroom.linear_cross_entropy(x, w, target), (x, w))
    for k, given in enumerate(((x, w.detach()), (x.detach(), w))):
        loss = headroom.linear_cross_entropy(*given, target)
        assert torch.equal(torch.autograd.grad(loss, given[k])[0], whole[k])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_that_is_retained_gives_the_same_again(dtype, device):
    leaves, target, _ = sample(dtype, device)
    x, w, b = leaves
    loss = headroom.linear_cross_entropy(x, w, target, b)
    first = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    again = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    last = torch.autograd.grad(loss + 2 * loss, leaves)
    for one, two, three in zip(first, again, last):
        assert torch.equal(one, two) and torch.equal(one, three)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_checkpoint_autocast_and_compile(device):
    leaves, target, _ = sample(device=device)
    x, w, b = leaves

    def loss(x, w, b):
        return headroom.linear_cross_entropy(x, w, target, b, z_loss=0.1, stats=("lse",))[0]

    wanted = torch.autograd.grad(loss(x, w, b), leaves)
    again = torch.autograd.grad(checkpoint(loss, x, w, b, use_reentrant=False), leaves)
    assert all(torch.equal(got, value) for got, value in zip(again, wanted))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, value in zip(torch.autograd.grad(compiled(x, w, b), leaves), wanted):
        torch.testing.assert_close(got, value)
    with torch.autocast(x.device.type, torch.bfloat16):
        cast = loss(x, w, b)
    narrow = [t.bfloat16() for t in leaves]
    assert torch.equal(cast, loss(*narrow)) and cast.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(cast, leaves))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_straight_into_grad(cut, dtype, device):
    leaves, target, _ = sample(dtype, device)
    x, w, b = leaves
    wanted = torch.autograd.grad(
        2 * headroom.linear_cross_entropy(x, w, target, b, **CUTS[cut]), leaves
    )
    for times in (1, 2):
        x.grad = None
        address = None if w.grad is None else w.grad.data_ptr()
        loss = headroom.linear_cross_entropy(
            x, w, target, b, accumulate_into_grad=True, **CUTS[cut]
        )
        (2 * loss).backward()
        assert address in (None, w.grad.data_ptr())
        for leaf, value, factor in zip(leaves, wanted, (1, times, times)):
            eps = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                leaf.grad, value * factor, rtol=eps, atol=eps * value.abs().max().item()
            )


def test_opcheck(device):
    leaves, target, (cw, tw) = sample(device=device)
    x, w, b = leaves
    options = ops.Options(label_smoothing=0.1).numbers(x)
    layer = (x, w, b, target, cw, tw)
    forward = torch.ops.headroom.linear_cross_entropy
    for reduction, results, wanted in ((1, 255, 7), (0, 3, 0), (2, 3, 5)):
        opcheck(forward, (*layer, None, -100, reduction, *options, results, wanted))
    with torch.no_grad():
        _, factors, _, lse, low, *_ = forward(*layer, None, -100, 1, *options, 3, 0)
        plain = tuple(t.detach() for t in layer)
        for wanted in (7, 2):
            opcheck(
                torch.ops.headroom.linear_cross_entropy_backward,
                (
                    torch.ones(ROWS, device=device),
                    *plain,
                    factors,
                    lse,
                    low,
                    -100,
                    *options,
                    wanted,
                ),
            )
        opcheck(
            torch.ops.headroom.linear_cross_entropy_backward_,
            (torch.ones((), device=device), *plain, factors, lse, low,
             torch.ones_like(plain[1]), None, -100, *options, True),
        )  # fmt: skip


def test_bad_inputs():
    leaves, target, _ = sample()
    x, w, b = leaves
    call = headroom.linear_cross_entropy
    wrong = target.clone()
    wrong[7] = CLASSES
    refused = [
        (RuntimeError, rf"target\[7\] is {CLASSES}, wanted a class", lambda: call(x, w, wrong)),
        (RuntimeError, "weight must be a matrix", lambda: call(x, w[:, 1:], target)),
        (RuntimeError, "weight has dtype", lambda: call(x, w.double(), target)),
        (RuntimeError, "bias must be a tensor", lambda: call(x, w, target, b[1:])),
        (RuntimeError, "target must have the shape", lambda: call(x, w, target[1:])),
        (RuntimeError, "target has dtype", lambda: call(x, w, target.float())),
        (RuntimeError, "wanted float32, bfloat16", lambda: call(x.double(), w.double(), target)),
        (
            RuntimeError,
            "class_weight must",
            lambda: call(x, w, target, class_weight=b.detach()[1:]),
        ),
        (RuntimeError, "token_weight requires", lambda: call(x, w, target, token_weight=x[:, 0])),
        (RuntimeError, "label_smoothing is 2", lambda: call(x, w, target, label_smoothing=2.0)),
        (RuntimeError, "softcap is -1", lambda: call(x, w, target, softcap=-1.0)),
        (RuntimeError, "logit_scale is 0", lambda: call(x, w, target, logit_scale=0.0)),
        (RuntimeError, "dimension of a sequence", lambda: call(x[0], w, target[0], shift=True)),
        (ValueError, "reduction is 'max'", lambda: call(x, w, target, reduction="max")),
        (ValueError, "mode is 'rows'", lambda: call(x, w, target, mode="rows")),
        (ValueError, "empty is 'one'", lambda: call(x, w, target, empty="one")),
        (ValueError, "stats is 'lse'", lambda: call(x, w, target, stats="lse")),
        (ValueError, "size is 'much'", lambda: call(x, w, target, workspace="much")),
        (
            ValueError,
            "denominator is given",
            lambda: call(x, w, target, reduction="none", denominator=3.0),
        ),
        (
            RuntimeError,
            "needs all classes at once",
            lambda: call(x, w, target, stats=("rank",), mode="vocabulary", workspace=1),
        ),
        (
            ValueError,
            "weight is not a leaf",
            lambda: call(x, w * 1, target, accumulate_into_grad=True),
        ),
    ]
    for error, message, refuse in refused:
        with pytest.raises(error, match=message):
            refuse()


@pytest.mark.slow
def test_more_logits_than_32_bits_count():
    """2^31 logits and more, of which 64 rows exist at a time, and one tile of classes."""
    rows, classes = 70_000, 31_000
    x, w = torch.ones(rows, 1), torch.zeros(classes, 1)
    target = torch.arange(rows) % classes
    w[classes - 1] = 1.0
    exact = math.log(classes - 1 + math.e) - (target == classes - 1).double().mean().item()
    for mode in ("tokens", "vocabulary"):
        loss = headroom.linear_cross_entropy(x, w, target, mode=mode, workspace="16 MiB")
        assert loss.item() == pytest.approx(exact, rel=1e-6)
