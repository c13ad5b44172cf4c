"""The op headroom::momentum_, by sgd_ and lion_: the bits of torch, the published rules in float64,
codes of moments, registration, and what it refuses."""

import functools

import headroom
import pytest
import torch
from headroom._core.table import table_of
from headroom.functional import dequantize_blocks, lion_, quantize_blocks, sgd_

from helpers.bits import assert_same_bits

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((31, 17), (5,), (0, 3), (), (600,))
SGDS = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "momentum": {"momentum": 0.9},
    "damped": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.01},
}


def tensors(dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]


def counters(device, step=0):
    return [torch.tensor(float(step), dtype=torch.float64, device=device) for _ in SHAPES]


def has_fused_products(device):
    """Torch's vector loops round a product and a sum once where the processor can."""
    return device != "cpu" or torch.backends.cpu.get_cpu_capability() != "DEFAULT"


@pytest.mark.parametrize("options", SGDS.values(), ids=SGDS)
def test_float32_has_the_bits_of_torch(options, device):
    if not has_fused_products(device):
        pytest.skip("torch has other bits on this processor")
    ours, theirs = (list(map(torch.nn.Parameter, tensors(device=device))) for _ in range(2))
    reference = torch.optim.SGD(theirs, lr=0.013, foreach=True, **options)
    buffers = [torch.zeros_like(p) for p in ours] if options.get("momentum") else []
    steps = counters(device)
    for step in range(4):
        grads = tensors(device=device, seed=step + 1)
        for param, grad in zip(theirs, grads):
            param.grad = grad.clone()
        reference.step()
        with torch.no_grad():
            sgd_(ours, grads, buffers, steps, lr=0.013, **options)
        assert_same_bits(ours, theirs)
        if buffers:
            assert_same_bits(buffers, [reference.state[p]["momentum_buffer"] for p in theirs])


def sgd_in_float64(params, grads, buffers, lr, first, momentum=0.0, dampening=0.0, **options):
    for k, grad in enumerate(grads):
        sign = -1 if options.get("maximize") else 1
        g = sign * grad + options.get("weight_decay", 0) * params[k]
        if momentum:
            buffers[k] = g if first else momentum * buffers[k] + (1 - dampening) * g
            g = g + momentum * buffers[k] if options.get("nesterov") else buffers[k]
        params[k] = params[k] - lr * g


def lion_in_float64(params, moments, grads, lr, beta1=0.9, beta2=0.99, weight_decay=0.0):
    for k, grad in enumerate(grads):
        u = (beta1 * moments[k] + (1 - beta1) * grad).sign()
        params[k] = params[k] * (1 - lr * weight_decay) - lr * u
        moments[k] = beta2 * moments[k] + (1 - beta2) * grad


@pytest.mark.parametrize("moment_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", SGDS.values(), ids=SGDS)
def test_sgd_against_float64(options, dtype, moment_dtype, device):
    """After one step from an old buffer, stored values are those of float64 to a rounding."""
    params, grads = tensors(dtype, device), tensors(torch.bfloat16, device, 1)
    has_buffers = bool(options.get("momentum"))
    buffers = tensors(moment_dtype, device, 2) if has_buffers else []
    exact = [p.double() for p in params], [b.double() for b in buffers]
    sgd_in_float64(exact[0], [g.double() for g in grads], exact[1], 0.05, False, **options)
    sgd_(params, grads, buffers, counters(device, 3), lr=0.05, **options)
    for got, wanted in zip((*params, *buffers), (*exact[0], *exact[1])):
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), wanted, rtol=eps, atol=2 * eps)


@pytest.mark.parametrize("moment_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_lion_against_float64(dtype, moment_dtype, device):
    params, grads = tensors(dtype, device), tensors(torch.float32, device, 1)
    moments = tensors(moment_dtype, device, 2)
    exact = [p.double() for p in params], [m.double() for m in moments]
    lion_in_float64(*exact, [g.double() for g in grads], 0.05, weight_decay=0.1)
    lion_(params, grads, moments, counters(device, 3), lr=0.05, weight_decay=0.1)
    for got, wanted in zip((*params, *moments), (*exact[0], *exact[1])):
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), wanted, rtol=eps, atol=2 * eps)


@pytest.mark.parametrize("block_size", [64, 128, 256, 512])
@pytest.mark.parametrize("step", [sgd_, lion_])
def test_codes_are_those_of_the_moments(step, block_size, device):
    """The step with codes is that with the numbers that they stand for, encoded afterwards."""
    step = functools.partial(step, lr=0.05, **({"momentum": 0.9} if step is sgd_ else {}))
    pairs = [quantize_blocks(t, is_signed=True, block_size=block_size) for t in tensors(seed=2)]
    codes, absmaxs = ([pair[i].to(device) for pair in pairs] for i in (0, 1))
    kind = {"is_signed": True, "block_size": block_size}
    numbers = [dequantize_blocks(c, a, **kind) for c, a in zip(codes, absmaxs)]
    grads = tensors(device=device, seed=1)
    params, twins = tensors(device=device), tensors(device=device)
    step(params, grads, codes, counters(device, 3), absmaxs=absmaxs, block_size=block_size)
    step(twins, grads, numbers, counters(device, 3))
    assert_same_bits(params, twins)
    wanted = [quantize_blocks(moment, **kind) for moment in numbers]
    assert_same_bits(codes, [pair[0] for pair in wanted])
    assert_same_bits(absmaxs, [pair[1] for pair in wanted])


def calls(device):
    """(args, kwargs) of calls that opcheck should look at."""
    options = {"rule": 0, "lr": 0.1, "dampening": 0.0, "beta1": 0.9, "beta2": 0.99}
    options |= {"weight_decay": 0.1, "nesterov": False, "maximize": False}
    params, grads, steps = tensors(device=device), tensors(device=device, seed=1), counters(device)
    yield (params, grads, [], [], [], []), options | {"momentum": 0.0}
    yield (params, grads, tensors(torch.bfloat16), [], steps, []), options | {"momentum": 0.9}
    codes = [torch.zeros(s, dtype=torch.uint8, device=device) for s in SHAPES]
    absmaxs = [torch.zeros(-(-c.numel() // 256), device=device) for c in codes]
    lion = options | {"momentum": 0.0, "rule": 1}
    yield (params, grads, codes, absmaxs, steps, []), lion
    turned = [[t.t() if t.dim() == 2 else t for t in list_] for list_ in (params, grads)]
    yield (*turned, [torch.zeros_like(p) for p in params], [], steps, []), lion


def test_opcheck_of_the_call_by_addresses():
    """It deals in addresses, which mean nothing for a fake tensor. Nothing traces it."""
    params, moments, steps = tensors(), tensors(seed=2), counters("cpu")
    state = {p: {"m": m, "step": s} for p, m, s in zip(params, moments, steps)}
    table = table_of((params, tensors(seed=1)), state, ("m",), ("step",))
    op, checks = torch.ops.headroom._momentum_table_, ("test_schema", "test_autograd_registration")
    *_, (_, options) = calls("cpu")
    options |= {"codes": False, "counted": True}
    torch.library.opcheck(op.default, (params[0], table), options, test_utils=checks)


def test_opcheck():
    op = torch.ops.headroom.momentum_.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for args, options in calls("cpu"):
        if all(a.shape == b.shape for a, b in zip(args[0], args[2])):
            torch.library.opcheck(op, args, options, test_utils=checks)


def test_a_compiled_call_has_the_bits_of_the_eager_one(fresh_dynamo):
    def step(params, grads, moments, steps):
        lion_(params, grads, moments, steps, lr=0.1, weight_decay=0.1)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    lists = [[tensors(), tensors(seed=1), tensors(seed=2), counters("cpu")] for _ in range(2)]
    for _ in range(2):
        step(*lists[0])
        compiled(*lists[1])
        for one, other in zip(*lists):
            assert_same_bits(one, other)


def test_views_and_other_strides(device):
    params, twins = tensors(device=device), tensors(device=device)
    turned = [p.t() if p.dim() == 2 else p for p in params]
    grads = tensors(device=device, seed=1)
    moments, zeros = ([torch.zeros_like(p) for p in params] for _ in range(2))
    spread = [torch.zeros(*p.shape, 2, device=device)[..., 1] for p in params]
    turned_grads = [g.t() if g.dim() == 2 else g for g in grads]
    sgd_(turned, turned_grads, [m.t() if m.dim() == 2 else m for m in spread],
         counters(device), lr=0.1, momentum=0.9)  # fmt: skip
    sgd_(twins, grads, zeros, counters(device), lr=0.1, momentum=0.9)
    assert_same_bits(params, twins)
    assert_same_bits(spread, zeros)
    assert all((m == 0).all() for m in moments)


def bad(name, change):
    return pytest.param(change, name, id=name)


@pytest.mark.parametrize(
    "change, words",
    [
        bad("grads has 4 tensors", lambda a: a["grads"].pop()),
        bad("momentum_buffers|moments has 4 tensors", lambda a: a["momentum_buffers"].pop()),
        bad(r"grads\[0\] has another shape", lambda a: a["grads"].__setitem__(0, torch.ones(2))),
        bad("lr is -1", lambda a: a.update(lr=-1.0)),
        bad("momentum is -1", lambda a: a.update(momentum=-1.0)),
        bad("dampening is nan", lambda a: a.update(dampening=float("nan"))),
        bad("nesterov is 1", lambda a: a.update(nesterov=True, dampening=0.5)),
        bad("weight_decay is inf", lambda a: a.update(weight_decay=float("inf"))),
        bad("SGD without momentum has none", lambda a: a.update(momentum=0.0)),
        bad("wanted uint8", lambda a: a.update(absmaxs=[torch.zeros(3) for _ in SHAPES])),
        bad("which HR_WEIGHTS_MASTER does not take", lambda a: a.update(master="f32")),
    ],
)
def test_what_it_refuses_changes_nothing(change, words):
    arguments = {
        "params": tensors(),
        "grads": tensors(seed=1),
        "momentum_buffers": tensors(seed=2),
        "state_steps": counters("cpu", 3),
        "lr": 0.1,
        "momentum": 0.9,
    }
    change(arguments)
    every = [t for value in arguments.values() if isinstance(value, list) for t in value]
    before = [t.clone() for t in every]
    with pytest.raises(RuntimeError, match=words):
        sgd_(**arguments)
    assert_same_bits(every, before)


def test_no_parameters():
    assert sgd_([], [], [], [], lr=0.1) is None and lion_([], [], [], [], lr=0.1) is None


def test_what_requires_grad_is_refused():
    params = list(map(torch.nn.Parameter, tensors()))
    with pytest.raises(RuntimeError, match="requires grad"):
        headroom.functional.sgd_(params, tensors(seed=1), [], [], lr=0.1)
