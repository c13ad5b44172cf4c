"""The distillation loss of hidden states against linear and a divergence, in float64 and torch."""

import functools

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.functional import divergence
from headroom.functional.gemm import gemm_into
from headroom.loss import linear_distillation_loss
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.divergences import KINDS, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N, STUDENT, TEACHER, CLASSES = 37, 24, 40, 301  # none a multiple of 8 but the student's size
CHUNK = 8 * 304 * 8  # bytes of the logits of 8 tokens: the chunks are 8, 8, 8, 8 and 5 tokens


class Sample:
    """Hidden states, weights and biases of both, and targets of which a third is ignored."""

    def __init__(self, dtype, device, size=1.0):
        generator = torch.Generator().manual_seed(0)

        def of(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.student = [of(N, STUDENT) * size, of(CLASSES, STUDENT), of(CLASSES)]
        self.teacher = [of(N, TEACHER) * size, of(CLASSES, TEACHER) / 2, of(CLASSES)]
        self.target = torch.arange(N, device=device)
        self.target[::3] = -100

    def fused(self, h, w, b, th, tw, tb, **options):
        return linear_distillation_loss(
            h, w, th, tw, self.target, student_bias=b, teacher_bias=tb, **options
        )

    def plain(self, h, w, b, th, tw, tb, kind, temperature, reduction):
        """linear, in the dtype of the tensors, and the divergence in float32 or better."""
        wide = torch.promote_types(h.dtype, torch.float32)
        logits = F.linear(h, w, b).to(wide), F.linear(th, tw, tb).to(wide)
        counts = self.target != -100
        rows = reference(*logits, kind, temperature) * counts
        return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / counts.sum()}[reduction]

    def results(self, function, dtype):
        """The loss and the gradients of the student's tensors."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.student]
        loss = function(*leaves, *(t.to(dtype) for t in self.teacher))
        scale = torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
        (loss * scale).sum().backward()
        return loss.detach(), *(leaf.grad for leaf in leaves)


def assert_as_good(ours, theirs, exact):
    """At most twice torch's error against float64, with one rounding of the largest value free."""
    for k, (got, other, value) in enumerate(zip(ours, theirs, exact, strict=True)):
        unit = torch.finfo(got.dtype).eps * value.abs().max().item() / 2
        error, limit = ((t.double() - value).abs().max().item() for t in (got, other))
        assert error <= 2 * limit + unit, f"output {k}: {error} against {limit}"


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, kind, reduction, device):
    sample = Sample(dtype, device)
    name, beta = KINDS[kind]
    options = {"temperature": 2.0, "reduction": reduction}
    fused = functools.partial(sample.fused, divergence=name, beta=beta, workspace=CHUNK, **options)
    plain = functools.partial(sample.plain, kind=kind, **options)
    got, exact = sample.results(fused, dtype), sample.results(plain, torch.float64)
    assert got[0].dtype == torch.float32 and all(g.dtype == dtype for g in got[1:])
    assert_as_good(got, sample.results(plain, dtype), exact)


@pytest.mark.parametrize(("kind", "temperature"), [(k, 1.0) for k in KINDS] + [("js", 4.0)])
def test_f16_under_a_loss_scale(kind, temperature, device):
    """The gradient of a logit is less than what float16 holds, unless it is scaled in time."""
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 16), (30_011, 16), (5, 24), (30_011, 24)
    student, teacher = [], []
    for k, shape in enumerate(shapes):
        tensor = torch.randn(shape, generator=generator).to(device, torch.float16) / 4
        (student if k < 2 else teacher).append(tensor)
    name, beta = KINDS[kind]

    def gradients(function, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in student]
        loss = function(*leaves, *(t.to(dtype) for t in teacher))
        return [g.double() / 2**16 for g in torch.autograd.grad(loss * 2**16, leaves)]

    def plain(h, w, th, tw):
        wide = torch.promote_types(h.dtype, torch.float32)
        logits = F.linear(h, w).to(wide), F.linear(th, tw).to(wide)
        return reference(*logits, kind, temperature).mean()

    fused = functools.partial(
        linear_distillation_loss, divergence=name, beta=beta, temperature=temperature
    )
    exact = gradients(plain, torch.float64)
    ours, theirs = gradients(fused, torch.float16), gradients(plain, torch.float16)
    for got, other, value in zip(ours, theirs, exact, strict=True):
        assert (got - value).norm() <= 2 * (other - value).norm()
        assert (got - value).norm() < 1e-3 * value.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_hidden_states_with_logits_of_60_and_more(kind, device):
    """Logits are float32, where bfloat16 would round them to steps of 1/4."""
    sample = Sample(torch.bfloat16, device, size=5.0)
    name, beta = KINDS[kind]
    plain = functools.partial(sample.plain, kind=kind, temperature=1.0, reduction="mean")
    got = sample.fused(*sample.student, *sample.teacher, divergence=name, beta=beta)
    exact = plain(*(t.double() for t in (*sample.student, *sample.teacher)))
    theirs = plain(*sample.student, *sample.teacher)
    assert (got - exact).abs() < 1e-5 * exact < (theirs - exact).abs()
    assert F.linear(*sample.student).abs().max() > 60


def test_the_weight_gradient_is_summed_in_float32(device):
    """128 chunks of a token each: sums in bfloat16 would lose what they add."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(128, 16, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(64, 16, generator=generator).to(device, torch.bfloat16).requires_grad_()
    teacher = torch.zeros(64, 16, device=device, dtype=torch.bfloat16)
    loss = linear_distillation_loss(
        hidden, weight, hidden, teacher, reduction="sum", workspace=2 * 4 * 64
    )
    (grad,) = torch.autograd.grad(loss, weight)
    logits = hidden.double() @ weight.detach().double().T
    dlogits = logits.softmax(-1) - 1 / 64
    exact = dlogits.T @ hidden.double()
    in_bf16 = torch.zeros_like(grad)
    for row, h in zip(dlogits.bfloat16(), hidden):
        in_bf16 += row[:, None] * h
    unit = torch.finfo(torch.bfloat16).eps * exact.abs().max() / 2
    error, other = ((g.double() - exact).abs().max() for g in (grad, in_bf16))
    assert error < 1.5 * unit and other > 5 * error


def test_chunks_give_what_one_chunk_gives(device):
    sample = Sample(torch.float32, device)
    of = functools.partial(sample.fused, divergence="js")
    whole = sample.results(functools.partial(of, workspace="1 GiB"), torch.float32)
    for workspace in (2 * 4 * 304, CHUNK, "50 KiB", None):
        got = sample.results(functools.partial(of, workspace=workspace), torch.float32)
        for one, other in zip(got, whole):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    again = sample.results(functools.partial(of, workspace="1 GiB"), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(whole, again))


def test_against_the_op_on_logits(device):
    """Sequences, masks, no bias, tokens that do not count: what divergence gives for linear."""
    sample = Sample(torch.float32, device)
    hidden, teacher = (t[0][:36].view(4, 9, -1) for t in (sample.student, sample.teacher))
    mask = torch.arange(36, device=device).view(4, 9) % 3 > 0
    weights = sample.student[1], sample.teacher[1]
    logits = F.linear(hidden, weights[0]), F.linear(teacher, weights[1])
    for options in ({}, {"mask": mask}, {"target": mask.long() - 1, "ignore_index": -1}):
        for reduction in ("mean", "batchmean", "sum", "none"):
            got = linear_distillation_loss(
                hidden, weights[0], teacher, weights[1], reduction=reduction, **options
            )
            wanted = divergence(*logits, reduction=reduction, **options)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert got.shape == (4, 9)


def test_no_token_counts(device):
    sample = Sample(torch.bfloat16, device)
    sample.target[:] = -100
    for reduction in ("mean", "sum", "none"):
        fused = functools.partial(sample.fused, reduction=reduction)
        assert all(t.eq(0).all() for t in sample.results(fused, torch.bfloat16))
    leaf = torch.zeros(0, 8, requires_grad=True, device=device)
    weight = torch.ones(5, 8, requires_grad=True, device=device)
    loss = linear_distillation_loss(leaf, weight, leaf.detach(), weight)
    grads = torch.autograd.grad(loss, (leaf, weight))
    assert loss == 0 and grads[0].shape == (0, 8) and grads[1].eq(0).all()


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_gradcheck(device):
    """Finite differences, whose errors in float32 are those of the loss over the step."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape):
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    student, teacher = [leaf(3, 4), leaf(6, 4), leaf(6)], [leaf(3, 5).detach(), leaf(6, 5)]
    for name, beta in KINDS.values():
        for reduction in ("mean", "none"):

            def loss(h, w, b, name=name, beta=beta, reduction=reduction):
                return linear_distillation_loss(
                    h, w, *teacher, divergence=name, beta=beta, student_bias=b,
                    reduction=reduction, workspace=2 * 4 * 8,
                )  # fmt: skip

            assert torch.autograd.gradcheck(loss, student, eps=1e-2, atol=2e-3, rtol=2e-2)


def test_frozen_parts_and_evaluation(device):
    """What needs no gradient costs no product: 2 N V per size, counted."""
    sample = Sample(torch.float32, device)
    hidden, weight, _ = sample.student
    of_student, of_teacher = 2 * N * CLASSES * STUDENT, 2 * N * CLASSES * TEACHER

    def flops(wants_hidden, wants_weight, reduction="mean"):
        h, w = hidden.clone(), weight.clone()
        h.requires_grad_(wants_hidden)
        w.requires_grad_(wants_weight)
        with FlopCounterMode(display=False) as counter:
            loss = linear_distillation_loss(h, w, *sample.teacher[:2], reduction=reduction)
            if loss.requires_grad:
                loss.sum().backward()
        assert (h.grad is not None) == wants_hidden and (w.grad is not None) == wants_weight
        return counter.get_total_flops()

    assert flops(False, False) == of_student + of_teacher
    assert flops(True, False) == 2 * of_student + of_teacher  # a frozen head
    assert flops(True, True) == 3 * of_student + of_teacher
    assert flops(True, True, "none") == 4 * of_student + 2 * of_teacher  # logits again
    frozen = sample.teacher[1].requires_grad_()
    loss = linear_distillation_loss(hidden.requires_grad_(), weight, sample.teacher[0], frozen)
    loss.backward()
    assert frozen.grad is None


def test_what_is_kept_and_allocated(device):
    """Gradients, and the logits of a chunk; neither those of all tokens nor what they come from."""
    tokens, classes, size, workspace = 512, 1000, 16, 2 * 4 * 1000 * 16
    hidden = torch.randn(tokens, size, device=device).requires_grad_()
    weight = torch.randn(classes, size, device=device).requires_grad_()
    of = functools.partial(linear_distillation_loss, workspace=workspace)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        of(hidden, weight, hidden.detach(), weight)
    assert sorted(t.numel() for t in kept) == [0, 1, tokens * size, classes * size]
    if device != "cpu":
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        loss = of(hidden, weight, hidden.detach(), weight)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    gradients = 4 * size * (tokens + classes)
    assert peak < workspace + 1.5 * gradients < 4 * tokens * classes / 5
    assert loss.requires_grad


def test_other_ways_to_a_gradient(device):
    sample = Sample(torch.float32, device)
    of = functools.partial(sample.fused, workspace=CHUNK)
    expected = sample.results(of, torch.float32)

    def reentrant(*inputs):
        return checkpoint(of, *inputs, use_reentrant=True)

    def without_reentry(*inputs):
        return checkpoint(of, *inputs, use_reentrant=False)

    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    for function in (reentrant, without_reentry, compiled):
        for got, wanted in zip(sample.results(function, torch.float32), expected):
            assert torch.equal(got, wanted)
    leaf = sample.student[0].clone().requires_grad_()
    loss = of(leaf, *sample.student[1:], *sample.teacher)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(leaf.grad, 2 * expected[1])
    with torch.inference_mode():
        assert torch.equal(of(*sample.student, *sample.teacher), expected[0])


def test_lengths_compile_once(device):
    """Chunks are laid out where the loss is computed, so that no number of tokens is a constant."""
    sample, compiles = Sample(torch.float32, device), []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    def of(h, w, th, tw):
        return linear_distillation_loss(h, w, th, tw, workspace=CHUNK)

    torch._dynamo.reset()
    compiled = torch.compile(of, fullgraph=True, dynamic=True, backend=backend)
    for count in (N, 20, 5, 9):
        (h, w, _), (th, tw, _) = sample.student, sample.teacher
        inputs = h[:count].clone(), w, th[:count].clone(), tw
        assert torch.equal(compiled(*inputs), of(*inputs))
    assert len(compiles) == 1


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_second_derivatives_are_refused(reduction, device):
    sample = Sample(torch.float32, device)
    leaf = sample.student[0].clone().requires_grad_()
    loss = sample.fused(leaf, *sample.student[1:], *sample.teacher, reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative, so a second derivative"):
        (loss.sum() + grad.square().sum()).backward()


def test_one_token_without_dimensions(device):
    sample = Sample(torch.float32, device)
    (h, w, _), (th, tw, _) = sample.student, sample.teacher
    for reduction in ("mean", "none"):
        leaves = [h[1].clone().requires_grad_(), h[1:2].clone().requires_grad_()]
        one, row = (
            linear_distillation_loss(leaf, w, teacher, tw, reduction=reduction)
            for leaf, teacher in zip(leaves, (th[1], th[1:2]))
        )
        assert one.shape == () and torch.equal(one, row.reshape(()))
        grads = [torch.autograd.grad(x.sum(), leaf)[0] for x, leaf in zip((one, row), leaves)]
        assert torch.equal(grads[0], grads[1][0])


def test_strides_and_heads_that_change_before_backward(device):
    """A mean needs its inputs no more: an optimizer may step in the backward pass."""
    sample = Sample(torch.float32, device)
    expected = sample.results(sample.fused, torch.float32)
    gaps = [torch.stack((t, t), -1)[..., 0].requires_grad_() for t in sample.student]
    loss = sample.fused(*gaps, *(torch.stack((t, t), -1)[..., 0] for t in sample.teacher))
    with torch.no_grad():
        gaps[1].zero_()
    for got, wanted in zip((loss.detach(), *torch.autograd.grad(loss, gaps)), expected):
        assert torch.equal(got, wanted)


def test_autocast(device):
    sample = Sample(torch.float32, device)
    lowered = [[t.bfloat16() for t in group] for group in (sample.student, sample.teacher)]
    leaf = sample.student[1].clone().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = sample.fused(sample.student[0], leaf, sample.student[2], *sample.teacher)
    assert torch.equal(loss, sample.fused(*lowered[0], *lowered[1]))
    loss.backward()
    assert leaf.grad.dtype == torch.float32 and leaf.grad.abs().sum() > 0


def test_opcheck(device):
    sample = Sample(torch.float32, device)
    student = [t[:9].clone().requires_grad_() for t in sample.student]
    teacher = [t[:9] for t in sample.teacher]
    check = functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    ignored = sample.target[:9] == -100
    op, arguments = torch.ops.headroom.linear_divergence, (*student, *teacher, ignored)
    for reduction in (0, 1, 2):
        numbers, wants = (0.5, 2.0), (4, True, True, True)
        check(op.default, (*arguments, *numbers, reduction, *wants))
        with torch.no_grad():
            _, *kept = op(*arguments, *numbers, reduction, *wants)
            dloss = torch.ones(9 if reduction == 0 else (), device=device)
            if reduction:
                scale = torch.ops.headroom.linear_divergence_scale
                check(scale.default, (dloss, *kept, torch.bfloat16))
            else:
                backward = torch.ops.headroom.linear_divergence_backward
                check(backward.default, (dloss, *arguments, *numbers, *wants))


BAD = {
    "student_hidden has dtype torch.float64": lambda s, t: (s[0].double(), s[1].double(), *t),
    r"student_weight is \[301, 23\], wanted \[classes, 24\]": lambda s, t: (s[0], s[1][:, 1:], *t),
    "student_weight is torch.bfloat16 on cpu, wanted torch.float32": lambda s, t: (
        s[0], s[1].bfloat16(), *t,
    ),
    r"teacher_hidden is \[36, 40\], but student_hidden is": lambda s, t: (*s, t[0][1:], t[1]),
    "the teacher has 300 classes, but the student 301: .* where one is padded, cut": lambda s, t: (
        *s, t[0], t[1][1:],
    ),
    "teacher_hidden requires grad": lambda s, t: (*s, t[0].clone().requires_grad_(), t[1]),
    r"teacher_hidden is \[40\], but student_hidden is \[37, 24\]": lambda s, t: (*s, t[0][0], t[1]),
    r"student_hidden has no dimensions, wanted \[": lambda s, t: (s[0][0, 0], s[1], *t),
    r"student_weight is \[0, 24\], wanted a class": lambda s, t: (s[0], s[1][:0], *t),
    r"target is \[36\], wanted \[37\]": lambda s, t: (*s, *t, torch.zeros(36).long()),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message):
    sample = Sample(torch.float32, "cpu")
    with pytest.raises(RuntimeError, match=message):
        linear_distillation_loss(*BAD[message](sample.student[:2], sample.teacher[:2]))


def test_bad_options():
    sample = Sample(torch.float32, "cpu")
    inputs = *sample.student[:2], *sample.teacher[:2]
    for options, error, message in (
        ({"divergence": "tv"}, ValueError, "divergence is 'tv', wanted one of"),
        ({"reduction": "avg"}, ValueError, "reduction is 'avg', wanted one of"),
        ({"workspace": "1 KiB"}, ValueError, "logits of one token, .* take 2.38 KiB"),
        ({"workspace": "many"}, ValueError, "workspace is 'many'"),
        (
            {"target": torch.zeros(N).long(), "ignore_index": None},
            TypeError,
            "ignore_index is None, wanted an integer",
        ),
        ({"temperature": -1.0}, RuntimeError, "config->temperature is -1"),
        ({"divergence": "js", "beta": 2.0}, RuntimeError, "config->beta is 2"),
        ({"student_bias": torch.zeros(300)}, RuntimeError, r"student_bias is \[300\], wanted"),
    ):
        with pytest.raises(error, match=message):
            linear_distillation_loss(*inputs, **options)
    assert headroom.linear_distillation_loss is linear_distillation_loss


def test_products_into_matrices_that_exist():
    """The product that the chunks are made of, with rows that have gaps."""
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(9, 7).bfloat16()
    memory = torch.full((5, 16), 3.0)
    gemm_into(memory[:, :9], a, b, transpose_b=True, bias=torch.arange(9.0))
    exact = a.double() @ b.double().T
    torch.testing.assert_close(memory[:, :9].double(), exact + torch.arange(9), rtol=0, atol=1e-5)
    assert memory[:, 9:].eq(3).all()
    version = memory._version
    gemm_into(memory[:, :9], a, b, transpose_b=True, beta=1.0)
    assert memory._version > version
    twice = 2 * exact + torch.arange(9)
    torch.testing.assert_close(memory[:, :9].double(), twice, rtol=0, atol=1e-5)
    for c, message in (
        (memory, r"c must be a matrix \[5, 9\]"),
        (memory[:, :9].half(), "c has dtype Half, wanted float32 or that of a"),
        (memory[:, :9].T.contiguous().T, "c must have dense rows"),
        (memory[:, :9].to("meta"), "a is on cpu, but c is on meta"),
    ):
        with pytest.raises(RuntimeError, match=message):
            gemm_into(c, a, b, transpose_b=True)
    with pytest.raises(RuntimeError, match="gemm_ has no derivative"):
        gemm_into(memory[:, :9], a.requires_grad_(), b, transpose_b=True)
