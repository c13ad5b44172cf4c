"""headroom.linear_cross_entropy against a formula in float64 and what torch has of it."""

import math

import headroom
import pytest
import torch
import torch.nn.functional as F

from helpers.linear_cross_entropy import (
    CUTS,
    DTYPES,
    OPTIONS,
    ROWS,
    as_float64,
    evaluated,
    reduced,
    reference,
    sample,
)


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


def test_sums_over_128_chunks_are_rounded_once():
    """A gradient that grows by the same small amount 128 times: rounded after each, it would stand
    still once the amount is less than half of a unit of the sum."""
    torch.manual_seed(0)
    x = torch.rand(128, 4).add(0.5).bfloat16().requires_grad_()
    w = torch.randn(33, 4).mul(0.1).bfloat16().requires_grad_()
    target = torch.zeros(128, dtype=torch.int64)
    cut = {"mode": "tokens", "workspace": 33 * 4}  # one row at a time
    loss = headroom.linear_cross_entropy(x, w, target, reduction="sum", **cut)
    (got,) = torch.autograd.grad(loss, w)
    leaves = as_float64((x, w))
    exact_loss = F.cross_entropy(leaves[0] @ leaves[1].T, target, reduction="sum")
    (exact,) = torch.autograd.grad(exact_loss, leaves[1])
    assert ((got.double() - exact).abs() / exact.abs()).max() < 2**-8


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
    with torch.no_grad():  # some hits, at the row's own place and at the next
        target[:, 4] = target[:, 5] = (x @ w.T + b).argmax(-1)[:, 4]
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
    ranks = headroom.linear_cross_entropy(x, w, target, b, workspace=1, stats=("rank",))[1]
    assert torch.equal(ranks["rank"], stats["rank"])  # of all classes at once, however few rows
    shifted = headroom.linear_cross_entropy(x, w, target, b, shift=True, stats=("accuracy",))[1]
    hits = (z.argmax(-1)[:, :-1] == target[:, 1:])[counts[:, 1:]]
    assert hits.any() and stats["accuracy"] > 0
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
