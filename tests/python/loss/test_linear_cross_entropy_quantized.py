"""headroom.linear_cross_entropy with a weight of 4 or 8 bits: beside the decoded weight, and beside
the formula in float64."""

import copy
from dataclasses import replace

import headroom
import pytest
import torch
from headroom._core.registration import by_name
from headroom.functional import dequantize_matrix, quantize_matrix
from headroom.functional import linear_cross_entropy as ops
from headroom.functional.quantize_matrix import FORMATS
from headroom.loss.language_model import is_plain_head, language_model_loss
from headroom.nn import LinearCrossEntropyLoss
from torch.autograd.graph import saved_tensors_hooks
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from helpers.linear_cross_entropy import (
    CLASSES,
    CUTS,
    DTYPES,
    FEATURES,
    OPTIONS,
    ROWS,
    as_float64,
    evaluated,
    sample,
)

loss_of = headroom.linear_cross_entropy


def quantized(dtype, device, to="nf4", **options):
    """Leaves of which the weight is decoded and frozen, its matrix, and the rest of a sample."""
    (x, w, b), target, factors = sample(dtype, device)
    q = quantize_matrix(w.detach(), to, **options)
    return (x, dequantize_matrix(q), b), q, target, factors


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", FORMATS)
def test_it_is_the_loss_of_the_decoded_weight(to, dtype, cut, options, device):
    leaves, q, target, factors = quantized(dtype, device, to, block_size=32)
    got, like = (
        evaluated(leaves, target, factors, OPTIONS[options], CUTS[cut], weight)
        for weight in (q, leaves[1])
    )
    # On CUDA, products of parts may be computed by other kernels.
    unit = 0 if device == "cpu" else 4 * torch.finfo(dtype).eps
    for a, b in zip(got, like, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=unit, atol=unit)
    trained = [leaves[0], leaves[1].requires_grad_(), leaves[2]]
    exact = evaluated(as_float64(trained), target, factors, OPTIONS[options])
    theirs = evaluated([t.float() for t in trained], target, factors, OPTIONS[options])
    terms = max(leaves[1].shape)
    for k, ours in enumerate(got):
        value, other = (each[k if k < 2 else 3] for each in (exact, theirs))
        # One rounding, and what a sum of so many terms in float32 is off by on average.
        units = torch.finfo(ours.dtype).eps + torch.finfo(torch.float32).eps * terms**0.5 / 2
        unit = units * value.abs().max().item()
        error, limit = ((t.double() - value).abs().max().item() for t in (ours, other))
        assert error <= 2 * limit + unit, f"result {k}: {error} against {limit}"


@pytest.mark.parametrize("mode", ("tokens", "vocabulary"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_the_classes(dtype, mode):
    """64 classes at a time take the 4 MiB; the logits are cut in two."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 16500, generator=generator).to(dtype).requires_grad_()
    q = quantize_matrix((torch.randn(150, 16500, generator=generator) / 64).to(dtype))
    target = torch.tensor([3, 149, -100, 70, 64, 127])
    cut = {"mode": mode, "workspace": 4 * 150 * 4}
    found = []
    for weight in (q, dequantize_matrix(q)):
        loss = loss_of(x, weight, target, z_loss=0.01, **cut)
        found.append((loss, *torch.autograd.grad(loss, x)))
    for a, b in zip(*found):
        if dtype == torch.float32:  # which is multiplied by all classes at once, if it is dense
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(a, b)


def test_every_way_to_the_gradients(device):
    leaves, q, target, _ = quantized(torch.float32, device)
    x, w, b = leaves
    wanted = torch.autograd.grad(loss_of(x, w, target, b), (x, b))
    for options in ({"reduction": "none"}, {"accumulate_into_grad": True}):
        x.grad = b.grad = None
        loss = loss_of(x, q, target, b, **options)
        (loss.sum() / (target >= 0).sum() if loss.dim() else loss).backward()
        for leaf, value in zip((x, b), wanted):
            torch.testing.assert_close(leaf.grad, value, rtol=1e-5, atol=1e-6)
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kept = []
        loss = loss_of(x, q, target, b)
    assert not {t.data_ptr() for t in kept if t.numel()} & {x.data_ptr(), q.codes.data_ptr()}
    (only,) = torch.autograd.grad(loss_of(x.detach(), q, target, b), b)
    torch.testing.assert_close(only, wanted[1])
    assert not loss_of(x.detach(), q, target).requires_grad
    compiled = torch.compile(
        lambda x, b: loss_of(x, q, target, b), fullgraph=True, backend="aot_eager"
    )
    for got, value in zip(torch.autograd.grad(compiled(x, b), (x, b)), wanted):
        torch.testing.assert_close(got, value)
    with FlopCounterMode(display=False) as counter:
        loss_of(x, q, target, b)
    assert counter.get_total_flops() == 2 * 2 * ROWS * FEATURES * CLASSES


def test_autocast_decodes_to_its_dtype(device):
    (x, _, b), q, target, _ = quantized(torch.float32, device)
    with torch.autocast(x.device.type, torch.bfloat16):
        cast = loss_of(x, q, target, b)
    assert torch.equal(cast, loss_of(x.bfloat16(), q, target, b.bfloat16()))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(cast, (x, b)))


def test_log_probabilities_and_stats(device):
    (x, w, b), q, target, _ = quantized(torch.float32, device)
    for weight in (q, w):
        found = headroom.loss.linear_log_prob(x, weight, target, b, return_entropy=True)
        wanted = found if weight is q else wanted  # noqa: F821
    for a, c in zip(found, wanted):
        torch.testing.assert_close(a, c)
    stats = [loss_of(x, v, target, b, stats=("rank", "accuracy"))[1] for v in (q, w)]
    assert all(torch.equal(stats[0][name], stats[1][name]) for name in stats[0])


def test_codes_of_any_strides_and_address(device):
    (x, _, b), q, target, _ = quantized(torch.bfloat16, device)

    def moved(tensor):
        memory = torch.empty(2 * tensor.numel() + 1, dtype=tensor.dtype, device=device)
        return memory[1::2].view(tensor.shape).copy_(tensor)

    other = replace(q, codes=moved(q.codes), scales=moved(q.scales))
    assert torch.equal(loss_of(x, q, target, b), loss_of(x, other, target, b))


@pytest.mark.parametrize("adds", (False, True))
def test_opcheck(adds, device):
    (x, _, b), q, target, _ = quantized(torch.float32, device, "int8")
    tensors, described = ops.of_weight(q)
    given = {"hidden": x, "bias": b, "target": target} | tensors | described
    absent = ("class_weight", "token_weight", "denominator", "factors", "entropy", "dentropy")
    given |= dict.fromkeys(absent)
    given |= ops.Options().numbers(x) | {"reduction": 1, "results": 3, "wanted": 5}
    names = ["linear_cross_entropy"]
    if adds:
        given = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
        lse = loss_of(x, q, target, b, stats=("lse",))[1]["lse"].detach()
        given |= {"lse": lse, "lse_low": torch.zeros_like(lse), "want_hidden": True}
        given |= {"dloss": torch.ones((), device=device), "weight_grad": None}
        given["bias_grad"] = torch.zeros_like(given["bias"])
        names = ["linear_cross_entropy_backward", "linear_cross_entropy_backward_"]
    for name in names:
        op = getattr(torch.ops.headroom, name).default
        opcheck(op, [given[argument.name] for argument in op._schema.arguments])


def test_bad_inputs():
    (x, w, b), q, target, _ = quantized(torch.float32, "cpu")
    op = by_name("linear_cross_entropy")
    given = {"hidden": x.detach(), "bias": None, "target": target, "reduction": 1}
    given |= dict.fromkeys(("class_weight", "token_weight", "denominator"))
    given |= ops.Options().numbers(x) | {"results": 0, "wanted": 0}
    tensors, described = ops.of_weight(q)
    given |= tensors | described

    def call(**other):
        return lambda: op(**given | other)

    few = "wanted codes and scales, and no weight, for format 1"
    for message, refuse in (
        ("codes has 2004 elements of .*, wanted 2005", call(codes=q.codes[1:])),
        ("codes has .* of Char", call(codes=q.codes.to(torch.int8))),
        ("scales has 8 elements", call(scales=q.scales[:8])),
        ("codes has .*, wanted 1995 ", lambda: loss_of(x, replace(q, shape=(210, 19)), target)),
        ("codes has .*, wanted 1899 ", lambda: loss_of(x[:, :18], q, target)),
        (few, call(weight=w)),
        (few, call(codes=None)),
        (few, call(scales=None)),
        ("wanted weight, and neither codes nor scales, for format 0", call(format=0)),
        ("format is 5, wanted 1", call(format=5)),
        ("format is -1, wanted 1", call(format=-1)),
        ("block_size is 48, wanted a power of two", call(block_size=48)),
        ("nested is true, but only", call(format=3)),
        ("with config->matrix, which has no gradient", call(wanted=2)),
        ("wanted float32, bfloat16", lambda: loss_of(x.double(), q, target)),
        ("bias has dtype", lambda: loss_of(x, q, target, b.bfloat16())),
    ):
        with pytest.raises(RuntimeError, match=message):
            refuse()
    with pytest.raises(TypeError, match="weight is None, wanted a tensor"):
        loss_of(x, None, target)


# ---- Modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_a_module_whose_layer_is_quantized(to):
    loss = LinearCrossEntropyLoss(FEATURES, CLASSES, bias=True, label_smoothing=0.1)
    (x, *_), target, _ = sample()
    headroom.quantize(loss, to, skip=())
    decoded = copy.deepcopy(loss)
    headroom.dequantize(decoded)
    assert type(loss.linear).__name__ in ("Linear4bit", "Linear8bit")
    assert torch.equal(loss(x, target), decoded(x, target))
    decoded.to(torch.bfloat16)
    assert torch.equal(loss(x.bfloat16(), target), decoded(x.bfloat16(), target))


def test_the_loss_of_a_quantized_head_makes_no_logits():
    (x, *_), target, _ = sample()
    head = headroom.nn.Linear4bit(FEATURES, CLASSES)
    assert is_plain_head(head)
    loss = language_model_loss(x, head, target, shift=False, softcap=5.0)
    logits = 5.0 * (head(x) / 5.0).tanh()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kept = []
        language_model_loss(x, head, target, shift=False)
    assert max(t.numel() for t in kept) <= x.numel()
    half = language_model_loss(x.bfloat16(), head, target, shift=False, z_loss=0.1)
    assert half.isfinite()  # the bias is cast, as the layer casts it
    head.register_forward_hook(lambda *_: None)
    assert not is_plain_head(head)
