"""The op headroom::glu against formulas in float64 and torch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import glu

from helpers.row_values import DTYPES, SHAPES, assert_as_good, gradients, rows_of

TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def sample(shape, dtype, device):
    gate, up, dh = rows_of(3, shape, dtype, device)
    return gate * 3, up, dh


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", TORCH)
@pytest.mark.parametrize("gated", (True, False), ids=("gated", "alone"))
def test_values_and_gradients(gated, activation, dtype, shape, device):
    gate, up, dh = sample(shape, dtype, device)
    inputs = (gate, up) if gated else (gate,)

    def reference(gate, *up):
        value = TORCH[activation](gate)
        return value * up[0] if up else value

    exact = gradients(reference, [t.double() for t in inputs], dh.double())
    theirs = gradients(reference, inputs, dh)
    ours = gradients(lambda *t: glu(*t, activation=activation), inputs, dh)
    assert [t.dtype for t in ours] == [dtype] * len(ours)
    assert_as_good(ours, theirs, exact, dtype)


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


def test_kept_for_backward(device):
    gate, up, _ = sample((64, 512), torch.bfloat16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        glu(gate.requires_grad_(), up.requires_grad_())
    assert sum(t.untyped_storage().nbytes() for t in kept) == 2 * 64 * 512 * 2


def test_under_autocast_the_wider_of_two_dtypes_counts(device):
    gate, up, _ = sample((3, 8), torch.float32, device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        assert glu(gate, up.bfloat16()).dtype == torch.float32
        assert glu(gate.bfloat16(), up.bfloat16()).dtype == torch.bfloat16


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
