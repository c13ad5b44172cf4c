"""Twins: the same parameters under Headroom's optimizer and under torch's for-loop."""

from __future__ import annotations

import headroom
import torch

# A step rounds a handful of float32 operations, of the size of the parameter or of the update.
CLOSE = {"rtol": 2**-21, "atol": 2**-24}


def close(left, right, what, **tolerance):
    torch.testing.assert_close(left, right, **tolerance, msg=lambda message: f"{what}: {message}")


def _on(param, grad):
    return grad.to(param.device, copy=True)


class Twins:
    """Two optimizers over parameters of equal values. What is done to one is done to the other."""

    def __init__(self, shapes=((4, 4), (7,), ()), name="AdamW", device="cpu", **options):
        start = [torch.randn(shape).to(device) for shape in shapes]
        self.ours = [torch.nn.Parameter(value.clone()) for value in start]
        self.theirs = [torch.nn.Parameter(value.clone()) for value in start]
        self.options = {"lr": 1e-2, "weight_decay": 0.1} | options
        self.optimizer = getattr(headroom.optim, name)(self.ours, **self.options)
        self.other = getattr(torch.optim, name)(self.theirs, foreach=False, **self.options)
        self.generator = torch.Generator().manual_seed(1)

    def sides(self):
        return (self.ours, self.optimizer), (self.theirs, self.other)

    def both(self, action):
        """Does action(params, optimizer) to both."""
        for params, optimizer in self.sides():
            action(params, optimizer)

    def random_grads(self, absent=()):
        for k, (a, b) in enumerate(zip(self.ours, self.theirs)):
            grad = torch.randn(b.shape, generator=self.generator, dtype=b.dtype)
            a.grad, b.grad = (None, None) if k in absent else (_on(a, grad), _on(b, grad))

    def step(self, count=1, absent=()):
        for _ in range(count):
            self.random_grads(absent)
            self.optimizer.step()
            self.other.step()
        return self

    def check(self, **tolerance):
        """Parameters and states are as torch has them."""
        tolerance = CLOSE | tolerance
        for k, (a, b) in enumerate(zip(self.ours, self.theirs)):
            close(a, b, f"parameter {k}", **tolerance)
            mine, its = self.optimizer.state[a], self.other.state[b]
            assert mine.keys() == its.keys()
            for key, value in its.items():
                if key == "step":
                    assert mine[key].item() == value.item(), f"step of parameter {k}"
                else:
                    close(mine[key], value, f"{key} of parameter {k}", **tolerance)
        return self
