"""The op headroom::cross_entropy against a formula in float64 and torch's own."""

import functools

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from helpers.row_values import DTYPES, assert_as_good

SHAPES = ((5, 7), (2, 3, 640), (33, 1025), (16, 1), (4, 5003))
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 8.0},
    "z_loss": {"z_loss": 1e-3, "reduction": "sum"},
    "all": {"label_smoothing": 0.2, "softcap": 20.0, "z_loss": 1e-2},
}


def sample(shape, dtype, device, size=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * size).to(device, dtype)
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    if target.numel() > 2:
        target.view(-1)[::3] = -100
    weight = torch.rand(shape[-1], generator=generator) + 0.5
    return logits, target.to(device), weight.to(device)


def reference(logits, target, weight=None, label_smoothing=0.0, softcap=None, z_loss=0.0,
              reduction="mean", loss_of=F.cross_entropy):  # fmt: skip
    """In the precision of the logits: softcap and z-loss around torch's cross entropy."""
    z = logits if softcap is None else softcap * (logits / softcap).tanh()
    rows, targets = z.flatten(0, -2), target.flatten()
    weight = None if weight is None else weight.to(z.dtype)
    loss = loss_of(rows, targets, weight, reduction=reduction, label_smoothing=label_smoothing)
    if reduction == "none":
        loss = loss.view(target.shape)
    squares = torch.where(target == -100, 0.0, z_loss * z.logsumexp(-1) ** 2)
    count = (target != -100).sum()
    return loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / count}[reduction]


def loss_and_gradient(function, logits, *arguments, **options):
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf, *arguments, **options)
    (
        loss * torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    ).sum().backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", (3.0, 20.0))
def test_values_and_gradients(size, dtype, shape, options, device):
    logits, target, weight = sample(shape, dtype, device, size)
    weight = weight if options in ("sum", "all") else None
    options = OPTIONS[options]
    got = loss_and_gradient(cross_entropy, logits, target, weight, **options)
    exact = loss_and_gradient(reference, logits.double(), target, weight, **options)
    theirs = loss_and_gradient(reference, logits.float(), target, weight, **options)
    assert got[0].dtype == torch.float32 and got[1].dtype == dtype
    # The loss is that of float32 logits whatever their dtype; torch's of bfloat16 is far off.
    assert_as_good(got, (theirs[0], theirs[1].to(dtype)), exact, (torch.float32, dtype))


def test_logits_whose_bf16_loss_is_wrong_in_torch(device):
    logits, target, _ = sample((64, 500), torch.bfloat16, device, 20.0)
    exact = loss_and_gradient(reference, logits.double(), target)
    got = loss_and_gradient(cross_entropy, logits, target)
    theirs = loss_and_gradient(F.cross_entropy, logits, target)
    assert (got[0] - exact[0]).abs() < 1e-6 * exact[0] < (theirs[0] - exact[0]).abs()


@pytest.mark.parametrize("target_dtype", (torch.int64, torch.int32), ids=str)
def test_extreme_rows(target_dtype, device):
    """Masked classes, equal logits, large logits, one class: what torch gives."""
    inf = float("inf")
    logits = torch.tensor(
        [[1.0, -inf, 2.0], [-inf] * 3, [5.0] * 3, [60.0, -60.0, 59.5], [-inf, 0.0, 1.0]],
        device=device,
    )
    target = torch.tensor([0, 1, 2, 1, 0], device=device)
    for dtype in DTYPES:
        got = loss_and_gradient(
            cross_entropy, logits.to(dtype), target.to(target_dtype), reduction="none"
        )
        wanted = loss_and_gradient(F.cross_entropy, logits, target, reduction="none")
        torch.testing.assert_close(got[0], wanted[0], equal_nan=True)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got[1].float(), wanted[1], rtol=eps, atol=1e-6, equal_nan=True)
    one = loss_and_gradient(cross_entropy, logits[:1, :1], target[:1])
    assert one[0] == 0 and one[1].eq(0).all()


def test_more_than_the_loss(device):
    logits, target, _ = sample((3, 4, 50), torch.float32, device)
    counts = target != -100
    loss, lse, argmax = cross_entropy(
        logits.requires_grad_(), target, return_lse=True, return_argmax=True
    )
    assert loss.requires_grad and not lse.requires_grad
    wanted = torch.where(counts, logits.logsumexp(-1), 0.0)
    torch.testing.assert_close(lse, wanted.detach())
    assert torch.equal(argmax, torch.where(counts, logits.argmax(-1), -1))
    assert torch.equal(cross_entropy(logits, target, return_lse=True)[1], lse)
    assert torch.equal(cross_entropy(logits, target, return_argmax=True)[1], argmax)
    classes = target.clamp(0)
    ignored = classes.masked_fill(classes == 7, -100)
    assert torch.equal(
        cross_entropy(logits, classes, ignore_index=7), cross_entropy(logits, ignored)
    )


def test_no_row_counts(device):
    logits = torch.randn(4, 6, device=device, requires_grad=True)
    ignored = torch.full((4,), -100, device=device)
    for empty, wanted in (("nan", float("nan")), ("zero", 0.0)):
        for given, target in ((logits, ignored), (logits[:0], ignored[:0])):
            loss = cross_entropy(given, target, empty=empty, z_loss=0.1)
            torch.testing.assert_close(loss.item(), wanted, equal_nan=True)
            (grad,) = torch.autograd.grad(loss, logits)
            assert grad.eq(0).all()
    assert cross_entropy(logits, ignored, reduction="sum") == 0
    assert cross_entropy(logits, ignored, reduction="none").eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_over_the_logits(dtype, device):
    hidden = torch.randn(6, 32, device=device).to(dtype).requires_grad_()
    head = torch.randn(200, 32, device=device).to(dtype)
    target = torch.arange(6, device=device)
    results = []
    for in_place in (False, True):
        logits = hidden @ head.T
        version, address = logits._version, logits.data_ptr()
        kept = []
        logits.register_hook(lambda grad, kept=kept: kept.append((grad.data_ptr(), grad.clone())))
        loss = cross_entropy(logits, target, inplace_backward=in_place, label_smoothing=0.1)
        hidden.grad = None
        loss.backward(retain_graph=True)
        assert (kept[0][0] == address) == in_place == (logits._version > version)
        results.append((loss.detach(), kept[0][1], hidden.grad.clone()))
        if in_place:
            assert torch.equal(logits.detach(), kept[0][1])
            with pytest.raises(RuntimeError, match="a second backward of cross_entropy with"):
                loss.backward()
    for apart, inside in zip(*results):
        assert torch.equal(apart, inside)


def test_gradient_over_logits_that_another_op_holds(device):
    logits = torch.randn(5, 9, device=device, requires_grad=True)
    target = torch.zeros(5, dtype=torch.int64, device=device)
    twice = logits * 2
    other = twice.square().sum()  # its backward needs what ours writes over
    loss = cross_entropy(twice, target, inplace_backward=True)
    torch.autograd.grad(loss, logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(other, logits)
    # Rows that are not evenly spaced, or have gaps, are written where they lie. A GPU adds up those
    # at other addresses in another order.
    rtol, atol = (1e-6, 1e-8) if logits.is_cuda else (0, 0)
    for view in (lambda t: t.T.contiguous().T, lambda t: torch.cat((t, t), 1)[:, :9]):
        expected = torch.autograd.grad(cross_entropy(logits * 2, target), logits)
        given = view(logits * 2)
        got = torch.autograd.grad(cross_entropy(given, target, inplace_backward=True), logits)
        torch.testing.assert_close(got[0], expected[0], rtol=rtol, atol=atol)


def test_strides_and_expanded_gradients(device):
    logits, target, weight = sample((6, 4, 24), torch.float32, device)
    apart = torch.randn(6, 4, 48, device=device)[..., :24].copy_(logits)
    turned = logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    target_view = torch.stack((target, target), -1)[..., 0]
    weight_view = torch.stack((weight, weight), -1)[..., 0]
    expected = loss_and_gradient(cross_entropy, logits, target, weight, reduction="none")
    for view in (apart, turned, logits.transpose(0, 1).contiguous().transpose(0, 1)):
        leaf = view.detach().requires_grad_()
        loss = cross_entropy(leaf, target_view, weight_view, reduction="none")
        assert torch.equal(loss, expected[0])
        (grad,) = torch.autograd.grad(loss.sum(), leaf)  # expanded from one element
        plain = logits.clone().requires_grad_()
        ones = cross_entropy(plain, target, weight, reduction="none")
        (wanted,) = torch.autograd.grad(ones, plain, torch.ones_like(ones))
        assert torch.equal(grad, wanted)
    rows = logits.view(24, 24).clone().requires_grad_()
    loss = cross_entropy(rows, target.view(24), reduction="none")
    scale = torch.rand(24, 3, device=device)
    (strided,) = torch.autograd.grad(loss, rows, scale[:, 1], retain_graph=True)
    (dense,) = torch.autograd.grad(loss, rows, scale[:, 1].contiguous())
    assert torch.equal(strided, dense)
    whole = cross_entropy(logits[0, 0], target[0, 1])  # one row, and a target without dimensions
    torch.testing.assert_close(whole, F.cross_entropy(logits[0, 0], target[0, 1]))


def test_rows_that_begin_beyond_2_31_elements(device):
    memory = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device)  # mostly untouched
    rows = memory.as_strided((2, 50), (2**31, 1)).copy_(torch.randn(2, 50))
    target = torch.tensor([3, 49], device=device)
    expected = loss_and_gradient(cross_entropy, rows.contiguous(), target)
    loss = cross_entropy(rows.requires_grad_(), target)
    assert torch.equal(loss.detach(), expected[0])
    assert torch.equal(torch.autograd.grad(loss, rows)[0], expected[1])


def test_kept_for_backward(device):
    logits, target, _ = sample((64, 512), torch.bfloat16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy(logits.requires_grad_(), target)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert sum(storages.values()) == 64 * 512 * 2 + 64 * 8 + 2 * 64 * 4 + 2 * 4


def test_other_ways_to_a_gradient(device):
    logits, target, weight = sample((8, 40), torch.float32, device)
    loss_of = functools.partial(cross_entropy, label_smoothing=0.1, softcap=9.0)
    expected = loss_and_gradient(loss_of, logits, target, weight)

    def reentrant(*inputs):
        return checkpoint(loss_of, *inputs, use_reentrant=True)

    def without_reentry(*inputs):
        return checkpoint(loss_of, *inputs, use_reentrant=False)

    def in_place(logits, *rest):
        return loss_of(logits * 1.0, *rest, inplace_backward=True)

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    compiled_in_place = torch.compile(in_place, fullgraph=True, backend="aot_eager")
    for function in (reentrant, without_reentry, in_place, compiled, compiled_in_place):
        for got, wanted in zip(loss_and_gradient(function, logits, target, weight), expected):
            assert torch.equal(got, wanted)
    with torch.no_grad():
        assert not loss_of(logits, target, weight).requires_grad
    with torch.inference_mode():
        assert torch.equal(loss_of(logits, target, weight), expected[0])
    leaf = logits.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(leaf, target, weight)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(leaf.grad, 2 * expected[1])


def test_autocast_and_profiler(device):
    logits, target, _ = sample((8, 40), torch.bfloat16, device)
    with torch.autocast(device.type if hasattr(device, "type") else device, torch.bfloat16):
        assert cross_entropy(logits, target).dtype == torch.float32
    leaf = logits.requires_grad_()
    with torch.profiler.profile() as profile:
        for _ in range(2):
            cross_entropy(leaf, target).backward()
    names = {event.name for event in profile.events()}
    assert {"headroom::cross_entropy", "headroom::cross_entropy_backward"} <= names


def test_second_derivative_raises(device):
    logits, target, _ = sample((3, 8), torch.float32, device)
    leaf = logits.requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(leaf, target), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="use inplace_backward=False"):
        torch.autograd.grad(
            cross_entropy(leaf * 1, target, inplace_backward=True), leaf, create_graph=True
        )


BAD = {
    "logits has no dimensions": lambda z, t: cross_entropy(z[0, 0], t[0]),
    "logits has dtype": lambda z, t: cross_entropy(z.double(), t),
    "target has dtype .*Short": lambda z, t: cross_entropy(z, t.short()),
    "probabilities of classes are not supported": lambda z, t: cross_entropy(z, z),
    "target must have the shape of logits without": lambda z, t: cross_entropy(z, t[:2]),
    "move it there with logits.movedim": lambda z, t: cross_entropy(z.view(2, 6, 2), t[:2]),
    "weight must be a float32 tensor of 8 elements": lambda z, t: cross_entropy(z, t, z[0, :7]),
    "weight requires grad": lambda z, t: cross_entropy(z, t, z[0].clone().requires_grad_()),
    "label_smoothing is 1.5": lambda z, t: cross_entropy(z, t, label_smoothing=1.5),
    "softcap is -1": lambda z, t: cross_entropy(z, t, softcap=-1.0),
    "z_loss is nan": lambda z, t: cross_entropy(z, t, z_loss=float("nan")),
    "cols is 0": lambda z, t: cross_entropy(z[:, :0], t),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, device):
    logits, target, _ = sample((3, 8), torch.float32, device)
    before = logits.clone(), target.clone()
    with pytest.raises(RuntimeError, match=message):
        BAD[message](logits, target)
    assert torch.equal(logits, before[0]) and torch.equal(target, before[1])


def test_bad_words_and_targets(device):
    logits, target, _ = sample((3, 8), torch.float32, device)
    for option, message in (
        ({"reduction": "avg"}, "reduction is 'avg', wanted one of none, mean, sum"),
        ({"empty": "one"}, "empty is 'one', wanted nan or zero"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy(logits, target, **option)
    with pytest.raises(ValueError, match="which is a leaf that requires grad"):
        cross_entropy(logits.clone().requires_grad_(), target, inplace_backward=True)
    target[1] = 8
    if logits.is_cuda:
        assert cross_entropy(logits, target).isnan()
        return
    with pytest.raises(RuntimeError, match=r"target\[1\] is 8, wanted a class from 0 to 7"):
        cross_entropy(logits, target)


def test_the_gradient_is_not_written_over_a_parameter():
    weight = torch.nn.Parameter(torch.randn(12))
    before = weight.detach().clone()
    for logits in (weight, weight.view(3, 4)):
        with pytest.raises(ValueError, match="a leaf that requires grad, or a view of one"):
            cross_entropy(logits, torch.tensor([0, 1, 2]), inplace_backward=True)
    assert torch.equal(weight.detach(), before)
