"""Stochastic rounding of the codes of headroom::adamw8bit_."""

import math

import pytest
import torch

from helpers.bits import assert_same_bits
from helpers.reference8bit import (
    MAPS,
    SHAPES,
    Sample,
    run,
    sample,
)


def stochastic(count=1 << 16, y=0.0437, steps=0, seed=1, device="cpu"):
    """First moments that are y in a block whose largest is 1; the first of each block is that."""
    grad = torch.full((count,), y)
    grad[::256] = 1
    zeros = [torch.zeros(count, dtype=torch.uint8), torch.zeros(-(-count // 256))]
    step = torch.tensor(float(steps), dtype=torch.float64)
    tensors = [torch.ones(count), grad * 10, *zeros, *(t.clone() for t in zeros), step]
    lists = Sample(*([tensor.to(device)] for tensor in tensors))
    return run(lists, seeds=[seed], weight_decay=0.0)


@pytest.mark.parametrize("y", [0.0437, -0.3333, 0.9, 3e-5, -1e-7])
def test_stochastic_codes_are_neighbors_and_right_on_average(y, device):
    lists = stochastic(y=y, device=device)
    codes = lists.exp_avgs[0].cpu()
    rest = torch.arange(len(codes)) % 256 != 0
    assert (codes[~rest] == 255).all()
    values = MAPS[True]
    y = (lists.grads[0][1] / lists.grads[0][0]).cpu().double().item()
    high = torch.searchsorted(values, y).item()
    chance = ((y - values[high - 1]) / (values[high] - values[high - 1])).item()
    assert set(codes[rest].tolist()) <= {high - 1, high}
    share = (codes[rest] == high).double().mean().item()
    deviation = math.sqrt(chance * (1 - chance) / rest.sum().item())
    assert abs(share - chance) < 5 * deviation + 1e-5


def test_stochastic_codes_depend_on_seed_step_and_element_alone(device):
    codes = stochastic(device=device).exp_avgs[0]
    assert torch.equal(codes, stochastic(device=device).exp_avgs[0])
    shorter = stochastic(count=1 << 12, device=device).exp_avgs[0]
    assert torch.equal(codes[: 1 << 12], shorter)
    others = {"seed": {"seed": 2}, "step": {"steps": 1}, "high half": {"seed": 1 + 2**63}}
    for name, options in others.items():
        same = (codes == stochastic(device=device, **options).exp_avgs[0]).double().mean()
        assert same < 0.95, name
    assert (codes[256:512] != codes[512:768]).any()


def test_stochastic_codes_do_not_depend_on_the_list(device):
    before = sample([(500,), (300,), (0,), (4000,)], device=device)
    together = run(before.clone(), seeds=[7, 2**64 - 1, 3, -1])
    for k, seed in enumerate([7, -1, 3, 2**64 - 1]):
        alone = run(before.clone().at(slice(k, k + 1)), seeds=[seed])
        assert_same_bits(alone.tensors(), together.at(slice(k, k + 1)).tensors())


def test_stochastic_rounding_changes_codes_alone(device):
    """The parameter sees the moments before they are rounded."""
    before = sample(SHAPES, device=device)
    nearest, rounded = run(before.clone()), run(before.clone(), seeds=range(len(SHAPES)))
    for name in ("params", "exp_avg_absmaxs", "exp_avg_sq_absmaxs", "steps"):
        assert_same_bits(getattr(nearest, name), getattr(rounded, name))
    for name in ("exp_avgs", "exp_avg_sqs"):
        far = [
            (a.int() - b.int()).abs().max().item()
            for a, b in zip(getattr(nearest, name), getattr(rounded, name))
        ]
        assert max(far) == 1, name
