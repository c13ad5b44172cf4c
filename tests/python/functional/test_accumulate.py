"""The op headroom::accumulate_: the suite of list ops, and compensated sums against float64."""

import math

import headroom
import pytest
import torch

from helpers.list_op import ListOpSuite


class TestAccumulate(ListOpSuite):
    name = "accumulate_"
    sizes = {"compensations": 2**-25}
    options = [
        lambda device: {},
        lambda device: {"factor": 0.25},
        lambda device: {"factor": 0.0, "zero_grads": True},
        lambda device: {"factor": torch.tensor([-7.0], device=device)},
        lambda device: {"factor": torch.tensor(1 / 3, device=device), "zero_grads": True},
        lambda device: {"factor": 1 / 3, "zero_grads": True},
    ]
    bad_options = {
        "factor is": [{"factor": math.inf}, {"factor": math.nan}, {"factor": 1e39}],
        "factor_tensor must be": [{"factor": torch.ones(2)}, {"factor": torch.ones(1).double()}],
    }

    def run(self, lists, **options):
        sums, grads, compensations = lists["sums"], lists["grads"], lists["compensations"]
        headroom.functional.accumulate_(sums, grads, compensations=compensations, **options)

    def written(self, **options):
        return {"sums", "compensations"} | ({"grads"} if options.get("zero_grads") else set())

    def reference(self, lists, factor=1.0, zero_grads=False):
        """In torch's float32, operation by operation."""
        sums, compensations, grads = lists["sums"], lists["compensations"], lists["grads"]
        factor = torch.as_tensor(factor, dtype=torch.float32).view(())
        terms = [g.float() * factor.to(g.device) for g in grads]
        ys = [x - lost for x, lost in zip(terms, compensations)] if compensations else terms
        totals = [total + y for total, y in zip(sums, ys)]
        rests = [(t - s) - y for t, s, y in zip(totals, sums, ys)] if compensations else []
        left = [torch.zeros_like(g) for g in grads] if zero_grads else grads
        return {"sums": totals, "compensations": rests, "grads": left}


def test_the_compensated_sum_stays_exact_over_10_000_additions(device):
    """The bound of headroom.h: 2 roundings of the sum of |x|. The plain sum is far beyond it."""
    generator = torch.Generator().manual_seed(0)
    plain, total, lost = (torch.zeros(512, device=device) for _ in range(3))
    exact = torch.zeros(512, dtype=torch.float64, device=device)  # and the sum of |x|: all are > 0
    for _ in range(10_000):
        x = (torch.rand(512, generator=generator) + 0.1).to(device)
        compensations = [torch.zeros_like(lost), lost]
        headroom.functional.accumulate_([plain, total], [x, x], compensations=compensations)
        exact += x.double()
    error = ((total - exact).abs() / exact).max().item()
    assert error <= 2 * 2**-24
    assert ((plain - exact).abs() / exact).max().item() > 20 * error


def test_a_sum_that_cancels(device):
    """1, then a thousand times 2^-25, then -1: the plain sum forgets all of them."""
    total, lost, plain = (torch.zeros(1, device=device) for _ in range(3))
    one, tiny = torch.ones(1, device=device), torch.full((1,), 2.0**-25, device=device)
    for x in (one, *[tiny] * 1000, -one):
        headroom.functional.accumulate_([total], [x], compensations=[lost])
        headroom.functional.accumulate_([plain], [x])
    assert plain == 0
    assert total.item() - lost.item() == pytest.approx(1000 * 2.0**-25, rel=1e-6)
