"""``headroom.linear_log_prob``: log-probabilities, and the losses of trainers that use them."""

import headroom
import pytest
import torch
import torch.nn.functional as F

BATCH, TOKENS, FEATURES, CLASSES = 4, 11, 20, 67


def given(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, TOKENS, FEATURES, generator=generator)
    weight = torch.randn(CLASSES, FEATURES, generator=generator) / 3
    target = torch.randint(CLASSES, (BATCH, TOKENS), generator=generator)
    for row, length in enumerate((11, 8, 9, 5)):
        target[row, length:] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


def plain(hidden, weight, target, bias=None, temperature=1.0, softcap=None):
    """What trainers compute: logits, log_softmax, gather."""
    z = F.linear(hidden, weight, bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1).gather(-1, target.clamp_min(0)[..., None])[..., 0]
    return logp * (target != -100)


def assert_tolerance_rule(got, theirs, exact):
    """The error against float64 is at most twice that of plain torch, and some roundings of what
    all gradients are multiplied by: a difference of sums over tokens, whose error is chance."""
    for mine, rounded, true in zip(got, theirs, exact, strict=True):
        errors = [(x.double() - true).norm() for x in (mine, rounded)]
        assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(torch.float32).eps * true.norm()


def assert_same_step(loss_of, hidden, weight):
    """The value of a loss and its gradients, with our log-probabilities and with torch's."""
    found = []
    for log_prob, dtype in (
        (headroom.linear_log_prob, torch.float32),
        (plain, torch.float32),
        (plain, torch.float64),
    ):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        loss = loss_of(log_prob, *leaves)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert_tolerance_rule(*found)


@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.7, None), (1.0, 6.0), (0.7, 6.0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients(with_bias, softcap, temperature):
    hidden, weight, target = given()
    bias = torch.linspace(-1, 1, CLASSES).requires_grad_() if with_bias else None
    options = dict(temperature=temperature, softcap=softcap)
    upstream = torch.randn(BATCH, TOKENS)

    def run(function, dtype):
        given = [
            None if x is None else x.detach().to(dtype).requires_grad_()
            for x in (hidden, weight, bias)
        ]
        logp = function(*given[:2], target, given[2], **options)
        leaves = [x for x in given if x is not None]
        return [logp.detach(), *torch.autograd.grad(logp, leaves, upstream.to(dtype))]

    got = run(headroom.linear_log_prob, torch.float32)
    assert got[0].shape == target.shape and got[0].dtype == torch.float32
    assert_tolerance_rule(got, run(plain, torch.float32), run(plain, torch.float64))


def test_entropy():
    hidden, weight, target = given()
    logp, entropy = headroom.linear_log_prob(
        hidden, weight, target, temperature=0.5, return_entropy=True
    )
    z = (hidden @ weight.t() / 0.5).double()
    want = torch.distributions.Categorical(logits=z).entropy() * (target != -100)
    torch.testing.assert_close(entropy.double(), want, rtol=1e-4, atol=1e-6)
    assert logp.requires_grad and entropy.requires_grad


NAMES = ("entropy", "is_top1", "mean_logit", "log_sum_sq_probs")


def plain_stats(hidden, weight, target, bias=None, temperature=1.0, softcap=None):
    z = F.linear(hidden, weight, bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1)
    counts = target != -100
    found = {
        "entropy": -(logp.exp() * logp).sum(-1),
        "is_top1": z.argmax(-1) == target,
        "mean_logit": (z / temperature).mean(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
    }
    return {name: value * counts for name, value in found.items()}


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("mode", ["tokens", "vocabulary"])
def test_stats(mode, softcap):
    """In one part and in several, of rows and of classes."""
    hidden, weight, target = given()
    weight = (4 * weight).detach()  # so that some classes are likely
    target = torch.where(target == -100, target, F.linear(hidden, weight).argmax(-1))
    target[:, ::3] = target[:, ::3].clamp(max=5)
    options = dict(temperature=0.7, softcap=softcap)
    want = plain_stats(hidden.double(), weight.double(), target, **options)
    rounded = plain_stats(hidden, weight, target, **options)
    for cut in ({}, {"mode": mode, "workspace": 1}):
        logp, found = headroom.linear_log_prob(
            hidden, weight, target, stats=NAMES, **options, **cut
        )
        assert list(found) == list(NAMES)
        same = headroom.linear_log_prob(hidden, weight, target, **options, **cut)
        assert torch.equal(logp, same)
        assert torch.equal(found["is_top1"], want["is_top1"])
        assert found["is_top1"].any() and not found["is_top1"].all()
        for name in ("entropy", "mean_logit", "log_sum_sq_probs"):
            assert_tolerance_rule([found[name].detach()], [rounded[name]], [want[name]])
        assert [n for n in NAMES if found[n].requires_grad] == ["entropy"]
    shifted = headroom.linear_log_prob(hidden, weight, target, stats=("is_top1",), shift=True)
    hits = F.linear(hidden, weight).argmax(-1)[:, :-1] == target[:, 1:]
    assert torch.equal(shifted[1]["is_top1"], F.pad(hits, (0, 1)))


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("with_loss", [True, False])
def test_gradients_of_entropies(with_loss, accumulates, softcap):
    """Of an entropy bonus beside log-probabilities, and of one alone."""
    hidden, weight, target = given()
    bias = torch.linspace(-1, 1, CLASSES).requires_grad_()
    options = dict(temperature=0.7, softcap=softcap)
    upstream = torch.randn(2, BATCH, TOKENS)

    def run(dtype, ours):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        x, w, b = leaves
        if ours:
            logp, found = headroom.linear_log_prob(
                x, w, target, b, stats=NAMES, accumulate_into_grad=accumulates, **options
            )
        else:
            found = plain_stats(x, w, target, b, **options)
            logp = plain(x, w, target, b, **options)
        up = upstream.to(dtype)
        bonus = (found["entropy"] * up[1]).sum()
        ((logp * up[0]).sum() + bonus if with_loss else bonus).backward()
        return [x.grad for x in leaves]

    assert_tolerance_rule(
        run(torch.float32, True), run(torch.float32, False), run(torch.float64, False)
    )


def test_an_entropy_that_nobody_derives_costs_no_gradient():
    hidden, weight, target = given()
    logp, found = headroom.linear_log_prob(hidden, weight, target, stats=("entropy",))
    same = headroom.linear_log_prob(hidden, weight, target)
    for mine, other in zip(
        torch.autograd.grad(logp.sum(), (hidden, weight)),
        torch.autograd.grad(same.sum(), (hidden, weight)),
    ):
        assert torch.equal(mine, other)
    mean, found = headroom.linear_cross_entropy(hidden, weight, target, stats=("entropy",))
    assert mean.requires_grad and not found["entropy"].requires_grad


def test_entropies_under_compilation():
    hidden, weight, target = given()

    def loss(x, w):
        logp, found = headroom.linear_log_prob(x, w, target, stats=NAMES)
        return logp.sum() - 0.1 * found["entropy"].sum() + found["is_top1"].sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    for mine, want in zip(got, torch.autograd.grad(loss(hidden, weight), (hidden, weight))):
        torch.testing.assert_close(mine, want)


def test_entropy_is_named_once():
    with pytest.raises(ValueError, match="name 'entropy' among stats"):
        headroom.linear_log_prob(*given(), return_entropy=True, stats=("entropy",))


def test_a_step_of_dpo():
    """Rafailov et al., arXiv:2305.18290. Half of the batch is chosen, the other half is not."""
    hidden, weight, target = given()
    other = given(1)[0].detach()  # of the model that is the reference

    def loss(log_prob, hidden, weight):
        ours = log_prob(hidden, weight, target).sum(-1)
        with torch.no_grad():
            theirs = log_prob(other.to(weight.dtype), weight, target).sum(-1)
        chosen, rejected = (ours - theirs).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    assert_same_step(loss, hidden, weight)


def test_a_step_of_grpo():
    """Shao et al., arXiv:2402.03300: clipped ratios, advantages of a group, and the k3 estimate of
    the divergence from the reference."""
    hidden, weight, target = given()
    mask = target != -100
    noise = torch.randn(BATCH, TOKENS)
    before = plain(hidden, weight, target, temperature=0.9).detach() + 0.3 * noise * mask
    near = hidden + given(1)[0] / 5
    base = plain(near, weight, target, temperature=0.9).detach()
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.2])
    advantages = ((rewards - rewards.mean()) / rewards.std())[:, None]

    def loss(log_prob, hidden, weight):
        logp = log_prob(hidden, weight, target, temperature=0.9)
        ratio = (logp - before).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        divergence = (base - logp).exp() - (base - logp) - 1
        each = (gain - 0.04 * divergence) * mask
        return -(each.sum(-1) / mask.sum(-1)).mean()

    assert_same_step(loss, hidden, weight)


def test_a_temperature_is_positive():
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature is"):
            headroom.linear_log_prob(*given(), temperature=temperature)


def test_options_that_would_make_it_another_number():
    for name, value in (("label_smoothing", 0.1), ("z_loss", 1.0), ("reduction", "sum")):
        with pytest.raises(TypeError, match=f"linear_log_prob takes no {name}, which would"):
            headroom.linear_log_prob(*given(), **{name: value})
