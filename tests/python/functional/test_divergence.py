"""The op headroom::divergence against formulas in float64 and the same of torch."""

import functools
import math

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.functional import divergence
from headroom.functional.divergence_chunks import gain_of

from helpers.divergences import ENDS, KINDS, reference
from helpers.row_values import DTYPES, assert_as_good

SHAPES = ((41, 7), (2, 3, 640), (33, 1025), (16, 1), (4, 5003))


def sample(shape, dtype, device, size=3.0, distance=3.0):
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(shape, generator=generator) * size
    teacher = student + torch.randn(shape, generator=generator) * distance
    return student.to(device, dtype), teacher.to(device, dtype)


def loss_and_gradient(function, student, *arguments, **options):
    leaf = student.detach().clone().requires_grad_()
    loss = function(leaf, *arguments, **options)
    scale = torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    (grad,) = torch.autograd.grad((loss * scale).sum(), leaf)
    return loss.detach(), grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size, distance, temperature", ((3.0, 3.0, 1.0), (20.0, 20.0, 2.0), (20.0, 0.01, 3.0))
)
def test_values_and_gradients(size, distance, temperature, dtype, shape, kind, device):
    student, teacher = sample(shape, dtype, device, size, distance)
    name, beta = KINDS[kind]
    options = {"divergence": name, "beta": beta, "temperature": temperature}
    got = loss_and_gradient(divergence, student, teacher, reduction="none", **options)
    exact, theirs = (
        loss_and_gradient(reference, student.to(of), teacher.to(of), kind, temperature)
        for of in (torch.float64, torch.float32)
    )
    assert got[0].dtype == torch.float32 and got[1].dtype == dtype
    assert_as_good(got, (theirs[0], theirs[1].to(dtype)), exact, (torch.float32, dtype))


@pytest.mark.parametrize("kind", KINDS | ENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size, distance", ((3.0, 3.0), (20.0, 20.0), (20.0, 0.01)))
def test_a_temperature_that_rounds_every_logit(size, distance, dtype, kind, device):
    """At 0.7 and |z| of 60 the quotient has an error of 4e-6, in torch too. Over so many rows the
    root of the mean square of the errors says which is larger, and not chance, as the largest."""
    student, teacher = sample((3000, 7), dtype, device, size, distance)
    name, beta = (KINDS | ENDS)[kind]
    options = {"divergence": name, "beta": beta, "temperature": 0.7}
    got = loss_and_gradient(divergence, student, teacher, reduction="none", **options)
    exact, theirs = (
        loss_and_gradient(reference, student.to(of), teacher.to(of), kind, 0.7)
        for of in (torch.float64, torch.float32)
    )
    for ours, other, value in zip(got, (theirs[0], theirs[1].to(dtype)), exact):
        error, limit = ((t.double() - value).square().mean().sqrt() for t in (ours, other))
        assert error <= 2 * limit


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("size, distance", ((3.0, 3.0), (20.0, 20.0), (3.0, 0.01)))
def test_errors_near_the_ends_of_beta_are_those_of_the_ends(size, distance, kind, device):
    """Loss and gradient are there as small as the lesser weight. Over that weight their errors are
    at most twice those of the forward and the reverse divergence in torch, in the same precision;
    torch's own mixture is off by some percent."""
    student, teacher = sample((300, 500), torch.float32, device, size, distance)
    end = "forward" if kind == "js 1e-6" else "reverse"
    loss_of = functools.partial(divergence, divergence="js", beta=ENDS[kind][1], reduction="none")
    ours, theirs = (
        [
            got.double() - exact
            for got, exact in zip(
                loss_and_gradient(function, student, teacher, *name),
                loss_and_gradient(reference, student.double(), teacher.double(), name_of_exact),
            )
        ]
        for function, name, name_of_exact in ((loss_of, (), kind), (reference, (end,), end))
    )
    for error, limit in zip(ours, theirs):
        assert error.square().mean().sqrt() / 1e-6 <= 2 * limit.square().mean().sqrt()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_whose_bf16_divergence_is_wrong_in_torch(kind, device):
    """|z| is up to 60 and more, where bfloat16 has steps of 1/4."""
    student, teacher = sample((64, 500), torch.bfloat16, device, 20.0, 1.0)
    name, beta = KINDS[kind]
    got = divergence(student, teacher, divergence=name, beta=beta)
    exact = reference(student.double(), teacher.double(), kind).mean()
    theirs = reference(student, teacher, kind).float().mean()
    assert (got - exact).abs() < 3e-6 * exact < (theirs - exact).abs()


def test_the_limits_of_beta(device):
    student, teacher = sample((5, 40), torch.float32, device)
    of = functools.partial(divergence, student, teacher, divergence="js")
    assert torch.equal(of(beta=0.0), divergence(student, teacher, divergence="forward_kl"))
    assert torch.equal(of(beta=1.0), divergence(student, teacher, divergence="reverse_kl"))
    # They are limits over beta and over 1 - beta, from which float64 is 1.5e-4 away at 1e-6.
    for kind, end in zip(ENDS, (0.0, 1.0)):
        near = reference(student.double(), teacher.double(), kind).mean() / 1e-6
        torch.testing.assert_close(near, of(beta=end).double(), rtol=2e-4, atol=0)
        got = of(beta=ENDS[kind][1]).double() / 1e-6
        torch.testing.assert_close(got, near, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        of(), divergence(teacher, student, divergence="js")
    )  # 1/2: either way
    assert of() < torch.tensor(2.0).log()


def test_what_torch_has(device):
    """kl_div of log-softmaxes, whose batchmean is the mean over rows."""
    student, teacher = sample((9, 40), torch.float32, device)
    logs = [(z / 2).log_softmax(-1) for z in (student, teacher)]
    wanted = F.kl_div(*logs, reduction="batchmean", log_target=True)
    for reduction in ("batchmean", "mean"):
        got = divergence(student, teacher, temperature=2.0, reduction=reduction)
        torch.testing.assert_close(got, wanted)
    total = divergence(student, teacher, divergence="reverse_kl", temperature=2.0, reduction="sum")
    torch.testing.assert_close(total, F.kl_div(*logs[::-1], reduction="sum", log_target=True))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_classes(kind, device):
    """Minus infinity in both, as padding has it, is as if the class were not there."""
    student, teacher = sample((5, 40), torch.float32, device)
    name, beta = KINDS[kind]
    wanted = loss_and_gradient(divergence, student, teacher, divergence=name, beta=beta)
    padding = student.new_full((5, 9), -float("inf"))
    padded = [torch.cat((z, padding), 1) for z in (student, teacher)]
    got = loss_and_gradient(divergence, *padded, divergence=name, beta=beta)
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1][:, :40], wanted[1])
    assert got[1][:, 40:].eq(0).all()


def test_rows_that_do_not_count(device):
    student, teacher = sample((3, 4, 50), torch.float32, device)
    target = torch.arange(12, device=device).view(3, 4)
    target[:, 1] = -100
    counts = target != -100
    student[~counts] = float("nan")  # they are not read
    kept = [z[counts] for z in (student, teacher)]
    for options in ({}, {"reduction": "sum"}):
        wanted = loss_and_gradient(divergence, *kept, **options)
        for given in ({"target": target}, {"mask": counts}, {"target": target.int()}):
            got = loss_and_gradient(divergence, student, teacher, **given, **options)
            torch.testing.assert_close(got[0], wanted[0])
            torch.testing.assert_close(got[1][counts], wanted[1])
            assert got[1][~counts].eq(0).all()
    rows = divergence(student, teacher, target, reduction="none")
    assert rows.shape == (3, 4) and rows[~counts].eq(0).all() and rows[counts].gt(0).all()
    seven = divergence(teacher, teacher + 1, torch.full((3, 4), 7, device=device), ignore_index=7)
    assert seven == 0
    leaf = teacher.clone().requires_grad_()
    nothing = divergence(leaf, teacher, mask=torch.zeros_like(counts))
    (grad,) = torch.autograd.grad(nothing, leaf)
    assert nothing == 0 and grad.eq(0).all()
    assert divergence(teacher[:0], teacher[:0]) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_over_the_logits(kind, dtype, device):
    hidden = torch.randn(6, 32, device=device).to(dtype).requires_grad_()
    head, teacher = torch.randn(200, 32).to(device, dtype), torch.randn(6, 200).to(device, dtype)
    name, beta = KINDS[kind]
    results = []
    for in_place in (False, True):
        logits = hidden @ head.T
        version, address = logits._version, logits.data_ptr()
        kept = []
        logits.register_hook(lambda grad, kept=kept: kept.append((grad.data_ptr(), grad.clone())))
        loss = divergence(logits, teacher, divergence=name, beta=beta, inplace_backward=in_place)
        (grad,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        assert (kept[0][0] == address) == in_place == (logits._version > version)
        results.append((loss.detach(), kept[0][1], grad))
        if in_place:
            with pytest.raises(RuntimeError, match="a second backward of divergence with"):
                loss.backward()
    for apart, inside in zip(*results):
        assert torch.equal(apart, inside)


@pytest.mark.parametrize("name", ["cross_entropy", "divergence"])
def test_a_gradient_over_the_logits_is_refused_where_a_graph_needs_them(name, device):
    student, teacher = sample((5, 30), torch.float32, device)
    second = torch.arange(5, device=device) if name == "cross_entropy" else teacher

    def loss(leaf):
        return getattr(headroom.functional, name)(leaf * 1.0, second, inplace_backward=True)

    leaf = student.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True .* use inplace_backward=False"):
        torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="torch.func may still need; use inplace_backward"):
        torch.func.grad(loss)(student)


def test_gradient_over_float32_logits_in_16_bits(device):
    """What the fused loss does: a narrower gradient over the memory of the logits."""
    student, teacher = sample((5, 300), torch.float32, device)
    ops, numbers = torch.ops.headroom, (0.5, 2.0)
    _, statistics = ops.divergence(student, teacher, None, *numbers, False)
    one = torch.ones((), device=device)
    wanted = ops.divergence_backward(one, student, teacher, None, statistics, *numbers)
    over = student.view(torch.bfloat16)[:, :300]
    ops.divergence_backward_(one, student, teacher, None, statistics, *numbers, over)
    assert torch.equal(over, wanted.bfloat16())


def test_strides_and_expanded_gradients(device):
    student, teacher = sample((6, 4, 24), torch.float32, device)
    loss_of = functools.partial(divergence, divergence="js", reduction="none")
    expected = loss_and_gradient(loss_of, student, teacher)
    for view in (
        lambda z: torch.cat((z, z), -1)[..., :24],
        lambda z: z.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        lambda z: z.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        leaf = view(student).detach().requires_grad_()
        loss = loss_of(leaf, view(teacher))
        assert torch.equal(loss, expected[0])
        scale = torch.linspace(1, 2, 24, device=device).view(6, 4)
        (grad,) = torch.autograd.grad(loss, leaf, scale.T.contiguous().T)
        assert torch.equal(grad, expected[1])
        given = view(student * 1.0).requires_grad_() * 1.0
        inside = loss_of(view(given), view(teacher), inplace_backward=True)
        (grad,) = torch.autograd.grad(inside.sum(), given)  # expanded from one element
        ones = loss_of(leaf, view(teacher))
        assert torch.equal(grad, torch.autograd.grad(ones, leaf, torch.ones_like(ones))[0])
    whole = loss_of(student[0, 0], teacher[0, 0])  # one row without dimensions
    assert torch.equal(whole, expected[0][0, 0])


def test_rows_that_begin_beyond_2_31_elements(device):
    memory = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device)  # mostly untouched
    rows = memory.as_strided((2, 50), (2**31, 1)).copy_(torch.randn(2, 50))
    teacher = torch.randn(2, 50).to(rows)
    expected = loss_and_gradient(divergence, rows.contiguous(), teacher)
    loss = divergence(rows.requires_grad_(), teacher)
    assert torch.equal(loss.detach(), expected[0])
    assert torch.equal(torch.autograd.grad(loss, rows)[0], expected[1])


def test_kept_for_backward(device):
    student, teacher = sample((64, 512), torch.bfloat16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        divergence(student.requires_grad_(), teacher, reduction="none")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert sum(storages.values()) == 2 * 64 * 512 * 2 + 64 * 24


def test_the_gain_of_float16_gradients_rounds_nothing():
    """It is a power of 2 for the gradient that is the largest, about 1 / temperature."""
    for temperature in (0.5, 1.0, 3.0):
        assert math.frexp(gain_of(torch.float16, temperature) / temperature)[0] == 0.5
        assert gain_of(torch.bfloat16, temperature) == gain_of(torch.float32, temperature) == 1


def test_profiler_and_autocast(device):
    student, teacher = sample((8, 40), torch.bfloat16, device)
    leaf = student.requires_grad_()
    with torch.profiler.profile() as profile, torch.autocast(device, torch.bfloat16):
        for _ in range(2):
            loss = divergence(leaf, teacher)
            assert loss.dtype == torch.float32
            loss.backward()
    names = {event.name for event in profile.events()}
    assert {"headroom::divergence", "headroom::divergence_backward"} <= names


BAD = {
    "student has no dimensions": lambda s, t: divergence(s[0, 0], t[0, 0]),
    "student has dtype": lambda s, t: divergence(s.double(), t.double()),
    "teacher has dtype BFloat16, but student": lambda s, t: divergence(s, t.bfloat16()),
    r"student is \[3, 8\], but teacher is \[3, 7\]": lambda s, t: divergence(s, t[:, :7]),
    "teacher requires grad": lambda s, t: divergence(s, t.clone().requires_grad_()),
    r"target is \[2\], wanted \[3\]": lambda s, t: divergence(s, t, torch.zeros(2).long()),
    "target has dtype torch.float32, wanted int": lambda s, t: divergence(s, t, s[:, 0]),
    "mask has dtype torch.int64, wanted bool": lambda s, t: divergence(s, t, mask=s[:, 0].long()),
    "beta is 1.5": lambda s, t: divergence(s, t, divergence="js", beta=1.5),
    "temperature is 0": lambda s, t: divergence(s, t, temperature=0.0),
    "cols is 0": lambda s, t: divergence(s[:, :0], t[:, :0]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, device):
    student, teacher = sample((3, 8), torch.float32, device)
    before = student.clone(), teacher.clone()
    with pytest.raises(RuntimeError, match=message):
        BAD[message](student, teacher)
    assert torch.equal(student, before[0]) and torch.equal(teacher, before[1])


def test_bad_words_and_backward_arguments(device):
    student, teacher = sample((3, 8), torch.float32, device)
    both = {"target": torch.zeros(3).long(), "mask": torch.ones(3, dtype=torch.bool)}
    for options, message in (
        ({"divergence": "kl"}, "divergence is 'kl', wanted one of forward_kl, reverse_kl, js"),
        ({"reduction": "avg"}, "reduction is 'avg', wanted one of none, mean, batchmean, sum"),
        (both, "target and mask are both given"),
    ):
        with pytest.raises(ValueError, match=message):
            divergence(student, teacher, **options)
    with pytest.raises(ValueError, match="which is a leaf that requires grad"):
        divergence(student.clone().requires_grad_(), teacher, inplace_backward=True)
    op = torch.ops.headroom.divergence_backward
    one, kept = torch.ones((), device=device), torch.zeros(3, 6, device=device)
    for arguments, message in (
        ((one.double(), student, teacher, None, kept), "dloss must be a float32 tensor"),
        ((one, student, teacher, None, kept[:2]), "statistics must be what headroom::divergence"),
        ((one, student, teacher, kept[:, 0], kept), "ignored must be a bool tensor of the shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="grad must have the shape and device of student"):
        into = torch.ops.headroom.divergence_backward_
        into(one, student, teacher, None, kept, 0.0, 1.0, student[:2].clone())
