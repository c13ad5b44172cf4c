"""The op headroom::glu against formulas in float64 and torch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import glu
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((5, 7), (2, 3, 640), (33, 1025), (1, 1))
TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def sample(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    gate, up, dh = (torch.randn(shape, generator=generator) for _ in range(3))
    return tuple(t.to(device, dtype) for t in (gate * 3, up, dh))


def gradients(function, inputs, dh):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    h = function(*inputs)
    h.backward(dh.to(h.dtype))
    return h.detach(), *(t.grad for t in inputs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", TORCH)
@pytest.mark.parametrize("gated", (True, False), ids=("gated", "alone"))
def test_values_and_gradients(gated, activation, dtype, shape, device):
    """At most twice torch's error against float64, with one rounding of the largest value free."""
    gate, up, dh = sample(shape, dtype, device)
    inputs = (gate, up) if gated else (gate,)

    def reference(gate, *up):
        value = TORCH[activation](gate)
        return value * up[0] if up else value

    exact = gradients(reference, [t.double() for t in inputs], dh.double())
    theirs = gradients(reference, inputs, dh)
    ours = gradients(lambda *t: glu(*t, activation=activation), inputs, dh)
    for k, (got, other, value) in enumerate(zip(ours, theirs, exact)):
        assert got.dtype == dtype
        unit = torch.finfo(dtype).eps * value.abs().max().item() / 2
        error, limit = ((t.double() - value).abs().max().item() for t in (got, other))
        assert error <= 2 * limit + unit, f"output {k}: {error} against {limit}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", TORCH)
def test_packed(activation, dtype, device):
    gate, up, dh = sample((3, 5, 36), dtype, device)
    h, dgate, dup = gradients(lambda g, u: glu(g, u, activation), (gate, up), dh)
    both = torch.cat((gate, up), -1)
    packed = gradients(lambda t: glu(t, activation=activation, packed=True), (both,), dh)
    assert torch.equal(packed[0], h)
    assert torch.equal(packed[1], torch.cat((dgate, dup), -1))
    halves = gradients(lambda t: glu(*t.chunk(2, -1), activation), (both,), dh)  # views with gaps
    assert torch.equal(halves[0], h) and torch.equal(halves[1], packed[1])


@pytest.mark.parametrize("packed", (False, True))
def test_activation_again(packed, device):
    gate, up, dh = sample((4, 24), torch.bfloat16, device)
    inputs = (torch.cat((gate, up), -1), None) if packed else (gate, up)
    op = torch.ops.headroom.glu_backward
    for wanted in (True, False):
        dgate, dup, h = op(dh, *inputs, 0, packed, wanted)
        assert torch.equal(h, glu(gate, up)) if wanted else h.numel() == 0
        assert dgate.shape == inputs[0].shape and dup.numel() == (0 if packed else gate.numel())


def test_infinities_and_large_values(device):
    """Limits where torch has NaN, and no overflow before the result is rounded."""
    inf = float("inf")
    x = torch.tensor([-inf, -3e38, -100.0, inf, 3e38, float("nan")], device=device)
    for activation in TORCH:
        unit = functools.partial(glu, activation=activation)
        h, slope = gradients(unit, (x,), torch.ones_like(x))
        assert h[0] == 0 and h[1] == 0 and h[2].abs() < 1e-40 and h[3] == inf and h[5].isnan()
        assert slope[0] == 0 and slope[1] == 0
        if activation != "relu_squared":
            assert slope[3] == 1 and slope[4] == 1 and torch.equal(h[4], x[4])
    big = torch.tensor([60000.0], dtype=torch.float16, device=device)
    h, dgate, dup = gradients(glu, (big, 1 / big), 2 * torch.ones_like(big))
    assert h == (big.double() * (1 / big).double()).half()
    assert dup.isinf() and dgate == 2 * (1 / big)


@pytest.mark.parametrize("arguments", [(True, False), (False, False), (False, True)], ids=str)
def test_opcheck(arguments, device):
    gated, packed = arguments
    gate, up, dh = (t.requires_grad_() for t in sample((4, 6), torch.float32, device))
    given = gate, up if gated else None, 0, packed
    torch.library.opcheck(torch.ops.headroom.glu.default, given)
    dh = dh.detach()[:, :3] if packed else dh.detach()
    given = dh, gate.detach(), up.detach() if gated else None, 0, packed, True
    torch.library.opcheck(torch.ops.headroom.glu_backward.default, given)


def test_strides_odd_addresses_and_expanded_gradients(device):
    gate, up, _ = sample((6, 4, 24), torch.float32, device)
    expected = gradients(glu, (gate, up), torch.ones_like(gate))
    odd = torch.empty(6 * 4 * 24 + 1, device=device)[1:].view(6, 4, 24).copy_(gate)
    apart = torch.empty(6, 4, 48, device=device)[..., :24].copy_(gate)
    turned = gate.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    swapped = gate.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (odd, apart, turned, swapped):
        leaf, other = view.detach().requires_grad_(), up.clone().requires_grad_()
        h = glu(leaf, other)
        assert torch.equal(h, expected[0]) and h.is_contiguous()
        h.sum().backward()  # its gradient is expanded from one element
        assert torch.equal(leaf.grad, expected[1]) and torch.equal(other.grad, expected[2])
    for shape in ((0, 24), (3, 0, 5)):
        empty = torch.empty(shape, device=device, requires_grad=True)
        glu(empty, empty).sum().backward()
        assert empty.grad.shape == shape


def test_kept_for_backward(device):
    gate, up, _ = sample((64, 512), torch.bfloat16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        glu(gate.requires_grad_(), up.requires_grad_())
    assert sum(t.untyped_storage().nbytes() for t in kept) == 2 * 64 * 512 * 2


@pytest.mark.parametrize("packed", (False, True))
def test_other_ways_to_a_gradient(packed, device):
    gate, up, dh = sample((8, 40), torch.float32, device)
    inputs = (torch.cat((gate, up), -1),) if packed else (gate, up)
    function = functools.partial(glu, packed=packed)
    expected = gradients(function, inputs, dh)

    def reentrant(*inputs):
        return checkpoint(function, *inputs, use_reentrant=True)

    def without_reentry(*inputs):
        return checkpoint(function, *inputs, use_reentrant=False)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for other in (reentrant, without_reentry, compiled):
        for got, wanted in zip(gradients(other, inputs, dh), expected):
            assert torch.equal(got, wanted)
    with torch.no_grad():
        assert not function(*inputs).requires_grad
    with torch.inference_mode():
        assert torch.equal(function(*inputs), expected[0])
    leaf = inputs[0].clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        h = function(leaf, *inputs[1:])
    h.backward(dh, retain_graph=True)
    h.backward(dh)
    assert torch.equal(leaf.grad, 2 * expected[1])


def test_one_frozen_input(device):
    gate, up, dh = sample((9, 33), torch.float32, device)
    _, dgate, dup = gradients(glu, (gate, up), dh)
    for k, wanted in enumerate((dgate, dup)):
        inputs = [gate.clone(), up.clone()]
        inputs[k].requires_grad_()
        glu(*inputs).backward(dh)
        assert torch.equal(inputs[k].grad, wanted) and inputs[1 - k].grad is None


def test_changed_inputs_are_noticed(device):
    gate, up, dh = sample((3, 8), torch.float32, device)
    leaf = gate.requires_grad_()
    h = glu(leaf * 1, up)
    up.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.backward(dh)


def test_second_derivative_raises(device):
    gate, up, dh = sample((3, 8), torch.float32, device)
    leaf = gate.requires_grad_()
    (grad,) = torch.autograd.grad(glu(leaf, up), leaf, dh, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
        grad.sum().backward()


def test_autocast_and_profiler_names(device):
    gate, up, dh = sample((3, 8), torch.float32, device)
    kind = torch.device(device).type
    with torch.autocast(kind, dtype=torch.bfloat16):
        assert glu(gate, up).dtype == F.silu(gate).dtype == torch.float32
        assert glu(gate.bfloat16(), up.bfloat16()).dtype == torch.bfloat16
    leaf = gate.requires_grad_()
    glu(leaf, up).backward(dh)
    with torch.profiler.profile() as profile:
        glu(leaf, up).backward(dh)
    names = {event.key for event in profile.key_averages()}
    assert {"headroom::glu", "headroom::glu_backward"} <= names


BAD = {
    "gate has no dimensions": lambda g, u: glu(torch.ones((), device=g.device)),
    "gate has dtype": lambda g, u: glu(g.double(), u),
    "up has another shape than gate": lambda g, u: glu(g, u[:2]),
    "up has dtype": lambda g, u: glu(g, u.half()),
    "gate has 7 columns, wanted an even number": lambda g, u: glu(g[:, :7], packed=True),
    "dh has another shape than h": lambda g, u: torch.ops.headroom.glu_backward(
        g, g, None, 0, True, False
    ),
    "config->activation is 5": lambda g, u: torch.ops.headroom.glu(g, u, 5, False),
    "up is given, but": lambda g, u: torch.ops.headroom.glu(g, u, 0, True),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, device):
    gate, up, _ = sample((3, 8), torch.float32, device)
    before = gate.clone(), up.clone()
    with pytest.raises(RuntimeError, match=message):
        BAD[message](gate, up)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


def test_bad_options(device):
    gate, up, _ = sample((3, 8), torch.float32, device)
    with pytest.raises(ValueError, match="activation is 'swish', wanted one of silu, gelu"):
        glu(gate, up, "swish")
    with pytest.raises(ValueError, match="up is given, but with packed=True"):
        glu(gate, up, packed=True)
