"""Runs of headroom.optim.Adam and AdamW beside torch's, and with states and gradients of other
dtypes."""

import headroom
import pytest
import torch

from helpers.bits import bits
from helpers.optimizer_suite import Twins, named, rows
from helpers.parameters import parameter
from helpers.reference import reference_step
from helpers.samples import DEFAULTS, Sample

TRAJECTORIES = {
    "defaults": {},
    "no weight decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "amsgrad, maximize": {"amsgrad": True, "maximize": True},
    "fast betas, large eps": {"betas": (0.5, 0.9), "eps": 1e-3},
    "beta1 0": {"betas": (0.0, 0.99)},
    "large lr": {"lr": 0.3},
}


@pytest.mark.parametrize("cls", [headroom.optim.AdamW, headroom.optim.Adam])
@pytest.mark.parametrize("options", TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_200_steps_follow_torch(cls, options, device):
    """Gradients are given, so rounding errors add up and nothing magnifies them: each of 200 steps
    may add half an ulp of the parameter (2^-24) and a few of the update (lr)."""
    twins = Twins(named(cls), ((31,), (5, 4), ()), device=device, **options)
    twins.step(200)
    lr = options.get("lr", 1e-2)
    twins.check(rtol=200 * 2**-24, atol=200 * 2**-22 * lr + 2**-21)


@rows(lambda row: row.cls in (headroom.optim.AdamW, headroom.optim.AdamW8bit))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_200_steps_with_a_tensor_lr(dtype, row, device):
    twins = Twins(row, device=device)
    lrs = [torch.tensor(1e-2, dtype=dtype, device=device) for _ in range(2)]
    for (_, optimizer), lr in zip(twins.sides(), lrs):
        optimizer.param_groups[0]["lr"] = lr
    for step in range(200):
        for lr in lrs:
            lr.fill_(1e-2 / (1 + step / 50))
        twins.step()
    twins.check(rtol=200 * 2**-24, atol=200 * 2**-22 * 1e-2)
    assert twins.optimizer.param_groups[0]["lr"] is lrs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_200_steps_stay_as_near_to_float64_as_torchs(dtype, device):
    """Training with feedback: the distance to the float64 trajectory is at most twice that of
    torch's fused optimizer in the same precision."""
    start = torch.randn(2000).to(device, dtype)
    ends = {}
    for kind in ("ours", "torch", "exact"):
        value = start.double() if kind == "exact" else start.clone()
        p = torch.nn.Parameter(value)
        generator = torch.Generator().manual_seed(3)
        options = {"lr": 2e-2, "weight_decay": 0.1}
        if kind == "ours":
            optimizer = headroom.optim.AdamW([p], **options)
        else:
            optimizer = torch.optim.AdamW([p], fused=kind == "torch", foreach=False, **options)
        target, weight = (torch.randn(2, 2000, generator=generator)).to(device, p.dtype)
        for _ in range(200):
            p.grad = (weight.abs() + 0.1) * (p.detach() - target)
            optimizer.step()
        ends[kind] = p.detach().double()
    far = {kind: (ends[kind] - ends["exact"]).norm().item() for kind in ("ours", "torch")}
    assert far["ours"] <= 2 * far["torch"], far
    assert far["torch"] < 0.2 * (ends["exact"] - start.double()).norm()  # and they went somewhere


STATE_MIXES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("param, state", STATE_MIXES, ids=str)
def test_state_dtype(param, state, device):
    """The moments have the dtype asked for, and a step is the op's."""
    p = parameter(50, device=device, dtype=param)
    optimizer = headroom.optim.AdamW([p], lr=1e-2, weight_decay=0.1, state_dtype=state)
    zeros = torch.zeros(50, device=device, dtype=state)
    step = torch.zeros((), dtype=torch.float64, device=device)
    lists = Sample([p.detach().clone()], [None], [zeros.clone()], [zeros.clone()], [], [step])
    for _ in range(5):
        p.grad = torch.randn_like(p)
        lists.grads[0] = p.grad
        optimizer.step()
        headroom.functional.adamw_(*lists.lists(), **DEFAULTS)
    assert torch.equal(bits(p), bits(lists.params[0]))
    assert {optimizer.state[p][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {state}
    assert optimizer.state[p]["step"].dtype == torch.float64


GRADIENT_MIXES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("param, grad", GRADIENT_MIXES, ids=str)
def test_gradients_of_another_dtype(param, grad, device):
    """torch.optim cannot step these."""
    p = parameter(64, device=device, dtype=param)
    start = p.detach().clone()
    p.grad_dtype = grad
    p.grad = torch.randn(64, device=device).to(grad)
    optimizer = headroom.optim.AdamW([p], lr=1e-2, weight_decay=0.1, state_dtype=torch.float32)
    optimizer.step()
    zeros = torch.zeros_like(start, dtype=torch.float32)
    one = Sample([start], [p.grad], [zeros], [zeros], [], [torch.zeros(())])
    exact = reference_step(one)
    ulp = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}[param]
    torch.testing.assert_close(p.detach().double(), exact.params[0], rtol=ulp, atol=2**-24)
    moment = optimizer.state[p]["exp_avg"]
    torch.testing.assert_close(moment.double(), exact.exp_avgs[0], rtol=2**-22, atol=0)


def test_backward_into_a_float32_gradient(device):
    p = parameter(8, device=device, dtype=torch.bfloat16)
    p.grad_dtype = torch.float32
    before = p.detach().clone()
    (p.float() * torch.arange(8.0, device=device)).sum().backward()
    assert p.grad.dtype == torch.float32
    headroom.optim.AdamW([p], lr=0.1).step()
    assert not torch.equal(before[1:], p[1:])
