"""Everything on ``cuda:1`` while ``cuda:0`` is current, and what a device guard is for.

Needs HEADROOM_SOFTWARE_DEVICE="devices=2 late ordered".
"""

import headroom
import headroom_rehearsal
import pytest
import torch
from torch import is_tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.cuda
STEPS = 2


@pytest.fixture
def two_devices(runtime):
    if torch.cuda.device_count() < 2 or not runtime.rehearsal_late():
        pytest.skip('needs HEADROOM_SOFTWARE_DEVICE="devices=2 late ordered"')
    assert torch.cuda.current_device() == 0
    yield runtime
    torch.cuda.synchronize(1)


def trained(make, device, dtype=torch.float32, scaled=False, clip=False, **options):
    """Returns what a few steps leave of the parameters and of the optimizer's states."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator) for shape in ((24, 16), (8, 32))]
    params = [nn.Parameter(t.to(device, dtype)) for t in drawn]
    optimizer = make(params, lr=1e-2, **options)
    scaler = headroom.amp.GradScaler(
        torch.device(device).type, enabled=scaled, init_scale=4.0, growth_interval=1
    )
    for _ in range(STEPS):
        for p in params:
            grad = torch.randn(p.shape, generator=generator) * (4.0 if scaled else 1.0)
            p.grad = grad.to(device, dtype)
        if scaled:
            scaler.scale(torch.zeros((), device=device))
            scaler.unscale_(optimizer)
        if clip:
            headroom.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
    states = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    scale = [scaler.scale(torch.ones((), device=device))] if scaled else []
    return [*params, *(v for v in states if isinstance(v, torch.Tensor)), *scale]


def accumulated(device):
    torch.manual_seed(0)
    net = nn.Linear(16, 4).to(device)
    accumulator = headroom.GradAccumulator(net)
    for x in torch.randn(4, 3, 16):
        with accumulator.micro_batch():
            net(x.to(device)).square().mean().backward()
    accumulator.finish()
    return [p.grad for p in net.parameters()]


def gradients_of(call, *tensors):
    leaves = [t.requires_grad_() for t in tensors]
    result = call(*leaves)
    return [result, *torch.autograd.grad(result.square().mean(), leaves)]


def fused_loss(device):
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(9, 16), torch.randn(40, 16), torch.randint(40, (9,))
    return gradients_of(
        lambda x, w: headroom.linear_cross_entropy(x, w, target.to(device)),
        hidden.to(device),
        weight.to(device),
    )


def mlp_block(device):
    torch.manual_seed(0)
    mlp, norm = headroom.nn.MLP(16, 24).to(device), nn.RMSNorm(16).to(device)
    x = torch.randn(3, 16).to(device)
    return gradients_of(
        lambda x: headroom.nn.functional.mlp_block(
            x, norm.weight, mlp.gate_up.weight, mlp.down.weight
        ),
        x,
    )


def experts(device):
    torch.manual_seed(0)
    x, weight, index = torch.randn(5, 16), torch.rand(5, 2), torch.arange(10).view(5, 2) % 3
    gate_up, down = torch.randn(3, 48, 16), torch.randn(3, 16, 24)
    return gradients_of(
        lambda x, weight, gate_up, down: headroom.functional.experts(
            x, index.to(device), weight, gate_up, down
        ),
        *(t.to(device) for t in (x, weight, gate_up, down)),
    )


def transformer(device):
    torch.manual_seed(0)
    config = headroom.nn.TransformerConfig(
        vocab_size=31, hidden_size=16, layers=1, heads=2, features=24, save="L3"
    )
    model, tokens = headroom.nn.Transformer(config).to(device), torch.randint(31, (2, 5))
    logits = model(tokens.to(device))
    return [logits, *torch.autograd.grad(logits.square().mean(), [*model.parameters()])]


def quantized_linear(device):
    torch.manual_seed(0)
    layer = headroom.nn.Linear4bit(64, 32, bias=True).to(device)
    x = torch.randn(5, 64)
    one_row = layer(x[:1].to(device))
    q = headroom.functional.quantize_matrix(x.to(device), "nf4", block_size=32)
    return [*gradients_of(layer, x.to(device)), one_row, layer.dequantize(), q.codes]


def of(make, **options):
    return lambda device: trained(make, device, **options)


SCENARIOS = {
    "AdamW": of(headroom.optim.AdamW),
    "AdamW bfloat16": of(headroom.optim.AdamW, dtype=torch.bfloat16),
    "AdamW8bit": of(headroom.optim.AdamW8bit),
    "Adafactor": of(headroom.optim.Adafactor),
    "Lion": of(headroom.optim.Lion),
    "SGD8bit": of(headroom.optim.SGD8bit, momentum=0.9),
    "Muon": of(headroom.optim.Muon),
    "scaler and clip": of(headroom.optim.AdamW, scaled=True, clip=True),
    "accumulator": accumulated,
    "fused loss": fused_loss,
    "mlp block": mlp_block,
    "experts": experts,
    "transformer": transformer,
    "quantized linear": quantized_linear,
}


def on_host(tensors):
    return [t.detach().cpu() for t in tensors]


def assert_close(there, on_cpu):
    for one, other in zip(there, on_cpu, strict=True):
        if one.dtype.is_floating_point:
            torch.testing.assert_close(
                one, other, rtol=1e-2 if one.itemsize == 2 else 1e-4, atol=1e-5
            )
        else:  # codes: another order of a sum may move one to the next code
            assert (one.int() - other.int()).abs().max() <= 1


class Noted(TorchDispatchMode):
    """Notes which ops of Headroom run; one of them runs as if it guarded no device."""

    def __init__(self, runtime, unguarded=None):
        super().__init__()
        self.ops, self._unguarded, self._hold = set(), unguarded, runtime.rehearsal_hold_device

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "headroom" and any(t.is_cuda for t in tree_leaves(args) if is_tensor(t)):
            self.ops.add(str(op))
        if str(op) != self._unguarded:
            return op(*args, **kwargs or {})
        device = headroom_rehearsal._device
        touch = device.touch

        def touch_guarded(*arguments):  # what was done is noted on its own device
            self._hold(-1)
            touch(*arguments)
            self._hold(0)

        device.touch = touch_guarded
        self._hold(0)
        try:
            return op(*args, **kwargs or {})
        finally:
            self._hold(-1)
            del device.touch


READS = {
    "cpu": lambda x: x.cpu(),
    "strided": lambda x: x[::2].cpu(),
    "item": lambda x: x[0].item(),
    "converted": lambda x: x.to("cpu", torch.float64),
    "sizes": lambda x: x.nonzero(),
    "computed": lambda x: x + 1,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_device_does_not_run_what_another_was_given(two_devices, read):
    x, source = torch.ones(4, device="cuda:1"), torch.zeros(4).pin_memory()
    there = source.to("cuda:0", non_blocking=True)
    read(x)
    source.fill_(1.0)  # which the copy sees, as it has not run
    assert there.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_second_device_does_what_the_cpu_does(two_devices, name):
    scenario = SCENARIOS[name]
    assert_close(on_host(scenario("cuda:1")), on_host(scenario("cpu")))
    assert torch.cuda.current_device() == 0
    assert two_devices.rehearsal_used(0) == 0 or torch.cuda.memory_allocated(0) == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_guard_that_is_left_out_is_noticed(two_devices, unordered, name):
    side = torch.cuda.Stream("cuda:1")

    def scenario(device):  # a device refuses kernels on a stream of another one
        with torch.cuda.stream(side), torch.cuda.device(0):
            found = on_host(SCENARIOS[name](device))
        side.synchronize()
        return found

    with Noted(two_devices) as noted:
        expected = scenario("cuda:1")
    assert noted.ops
    assert unordered() == ""
    unnoticed = []
    for op in sorted(noted.ops):
        try:
            with Noted(two_devices, op):
                found = scenario("cuda:1")
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        except Exception:
            same = False
        if not unordered() and same:
            unnoticed.append(op)
    assert unnoticed == []
