"""The ops headroom::rms_norm and headroom::layer_norm against formulas in float64 and torch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import layer_norm, rms_norm

from helpers.row_values import DTYPES, SHAPES, assert_as_good, gradients


def sample(shape, dtype, device, seed=0, weight_dtype=None):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(shape, generator=generator) for _ in range(3)]
    vectors = [torch.randn(shape[-1], generator=generator) for _ in range(2)]
    to = functools.partial(torch.Tensor.to, device=device)
    x, residual, dy = (to(t * 2 + 0.3, dtype=dtype) for t in rows)
    weight, bias = (to(t, dtype=weight_dtype or dtype) for t in vectors)
    return x, residual, dy, weight, bias


def rms_reference(x, weight, eps=1e-6, offset=0.0):
    hat = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return hat * (weight + offset)


def layer_reference(x, weight, bias, eps=1e-5):
    centered = x - x.mean(-1, keepdim=True)
    hat = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    return hat * weight + bias


@pytest.mark.parametrize("shape", (*SHAPES, (4, 4100)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", (False, True), ids=("rms", "layer"))
def test_values_and_gradients(layer, dtype, shape, device):
    x, _, dy, weight, bias = sample(shape, dtype, device)
    inputs = (x, weight, bias) if layer else (x, weight)
    ours = layer_norm if layer else functools.partial(rms_norm, casting="once")
    reference = layer_reference if layer else rms_reference

    def theirs(x, *vectors):
        if layer:
            return F.layer_norm(x, x.shape[-1:], *vectors)
        return F.rms_norm(x, x.shape[-1:], *vectors, eps=1e-6)

    exact = gradients(reference, [t.double() for t in inputs], dy.double())
    got = gradients(ours, inputs, dy)
    assert [t.dtype for t in got] == [dtype] * len(got)
    assert_as_good(got, gradients(theirs, inputs, dy), exact, dtype)


def test_castings_are_those_of_the_models(device):
    x, _, _, weight, _ = sample((40, 256), torch.bfloat16, device)
    hat = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    llama = weight * hat.to(x.dtype)  # transformers' LlamaRMSNorm
    gemma = (hat * (1.0 + weight.float())).to(x.dtype)  # transformers' GemmaRMSNorm
    narrow_root = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)
    cases = {
        "llama": (rms_norm(x, weight), llama),
        "once": (rms_norm(x, weight, casting="once", offset=1.0), gemma),
        "narrow": (rms_norm(x, weight, casting="narrow"), weight * (x * narrow_root)),
    }
    for name, (got, wanted) in cases.items():
        # Statistics are added in another order: a value may lie on the other side of a tie.
        differ = (got != wanted).float().mean().item()
        assert differ < 0.01, name
        assert torch.allclose(got.float(), wanted.float(), rtol=2**-6), name
    once, llama_result = rms_norm(x, weight, casting="once"), cases["llama"][0]
    assert (once != llama_result).float().mean() > 0.05


def llama(x, weight, root_dtype=torch.float32):
    """What transformers' LlamaRMSNorm computes."""
    wide = x.float()
    root = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(root_dtype)
    return weight * (wide * root).to(x.dtype)


@pytest.mark.parametrize("casting", ("llama", "narrow"))
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("cols", (1, 2, 77, 2056))
def test_gradients_that_cancel(cols, dtype, casting, device):
    """A gradient along x changes its length alone, which the norm takes away: dx is almost 0."""
    x, _, _, _, _ = sample((6, cols), dtype, device)
    weight = torch.ones(cols, dtype=dtype, device=device)
    model = functools.partial(llama, root_dtype=dtype if casting == "narrow" else torch.float32)
    exact = gradients(rms_reference, [x.double(), weight.double()], x.double())
    theirs = gradients(model, [x, weight], x)
    ours = gradients(functools.partial(rms_norm, casting=casting), [x, weight], x)
    unit = torch.finfo(torch.float32).eps * x.abs().max().item()
    for got, other, value in zip(ours[1:], theirs[1:], exact[1:]):
        limit = 2 * (other.double() - value).abs().max() + 64 * unit
        limit = limit + torch.finfo(dtype).eps * value.abs()
        assert ((got.double() - value).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", (False, True), ids=("rms", "layer"))
def test_residual(layer, dtype, device):
    x, residual, dy, weight, bias = sample((6, 5, 96), dtype, device)
    vectors = (weight, bias) if layer else (weight,)
    norm = layer_norm if layer else rms_norm

    def fused(x, residual, *vectors):
        return norm(x, *vectors, residual=residual)

    def apart(x, residual, *vectors):
        total = x + residual
        return norm(total, *vectors), total

    results = []
    for function in (fused, apart):
        inputs = [t.clone().requires_grad_() for t in (x, residual, *vectors)]
        y, total = function(*inputs)
        loss = (y.float() * dy.float()).sum() + total.float().square().sum()
        results.append((y, total, *torch.autograd.grad(loss, inputs)))
    fused_results, apart_results = results
    assert torch.equal(fused_results[0], apart_results[0])
    assert torch.equal(fused_results[1], apart_results[1])
    assert torch.equal(fused_results[2], fused_results[3])
    for got, wanted in zip(fused_results[2:], apart_results[2:]):
        # The gradients of the two uses are added before they are rounded, not after.
        torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps * 4, atol=1e-2 * 0.5)


def test_only_one_of_two_results_is_used(device):
    x, residual, dy, weight, _ = sample((6, 96), torch.float32, device)
    for k in (0, 1):
        inputs = [t.clone().requires_grad_() for t in (x, residual, weight)]
        result = rms_norm(inputs[0], inputs[2], residual=inputs[1])[k]
        dx, dresidual, dweight = torch.autograd.grad(result, inputs, dy, allow_unused=True)
        assert torch.equal(dx, dresidual)
        if k == 1:
            assert torch.equal(dx, dy) and dweight is None


@pytest.mark.parametrize("layer", (False, True), ids=("rms", "layer"))
def test_strides_and_expanded_gradients(layer, device):
    x, _, _, weight, bias = sample((6, 4, 24), torch.float32, device)
    norm = (lambda t: layer_norm(t, weight, bias)) if layer else (lambda t: rms_norm(t, weight))
    apart = torch.randn(6, 4, 48, device=device)[..., :24].copy_(x)  # rows with gaps
    turned = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    halves = torch.stack((x, x), 1)[:, 0]
    expected = norm(x)
    for view in (apart, turned, halves, x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(norm(view), expected)
        leaf = view.detach().requires_grad_()
        norm(leaf).sum().backward()  # its gradient is expanded from one element
        plain = x.clone().requires_grad_()
        (norm(plain) * torch.ones_like(x)).sum().backward()
        assert torch.equal(leaf.grad, plain.grad)
    empty = torch.empty(0, 24, device=device, requires_grad=True)
    own = weight.clone().requires_grad_()
    rms_norm(empty, own).sum().backward()
    assert empty.grad.shape == (0, 24) and own.grad.eq(0).all()


def test_kept_for_backward(device):
    x, _, _, weight, _ = sample((64, 512), torch.bfloat16, device, weight_dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x.requires_grad_(), weight.requires_grad_())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert sum(storages.values()) == 64 * 512 * 2 + 64 * 4 + 512 * 4  # x, rstd and the weight


BAD = {
    "x has no dimensions": lambda x, w: rms_norm(torch.ones((), device=x.device), None),
    "x has dtype": lambda x, w: rms_norm(x.double(), w),
    "weight must be a tensor \\[8\\]": lambda x, w: rms_norm(x, w[:7]),
    "weight has dtype": lambda x, w: rms_norm(x, w.double()),
    "bias has another dtype": lambda x, w: layer_norm(x, w, w.bfloat16()),
    "residual has another shape": lambda x, w: rms_norm(x, w, residual=x[:2]),
    "residual has dtype": lambda x, w: rms_norm(x, w, residual=x.half()),
    "eps is -1": lambda x, w: rms_norm(x, w, -1.0),
    "offset is": lambda x, w: rms_norm(x, w, offset=float("nan")),
    "cols is 0": lambda x, w: rms_norm(x[:, :0], None),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, device):
    x, _, _, weight, _ = sample((3, 8), torch.float32, device)
    before = x.clone(), weight.clone()
    with pytest.raises(RuntimeError, match=message):
        BAD[message](x, weight)
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1])
    with pytest.raises(ValueError, match="casting is 'lama', wanted one of once, llama, narrow"):
        rms_norm(x, weight, casting="lama")
