"""Twins: the same parameters under Headroom's optimizer and under torch's for-loop. For 8-bit
moments, which torch does not have, the loop calls the op on one parameter after the other."""

from __future__ import annotations

import copy

import headroom
import torch

# A step rounds a handful of float32 operations, of the size of the parameter or of the update.
CLOSE = {"rtol": 2**-21, "atol": 2**-24}
EQUAL = {"rtol": 0, "atol": 0}
NAMES = ["AdamW", "AdamW8bit"]  # every parameter of the second, however small, has 8-bit moments


def close(left, right, what, **tolerance):
    torch.testing.assert_close(left, right, **tolerance, msg=lambda message: f"{what}: {message}")


def _on(param, grad):
    return grad.to(param.device, copy=True)


class Loop8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments in the way of torch's for-loop."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, **ignored):
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=False)
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            options = {key: group[key] for key in ("lr", "eps", "weight_decay", "maximize")}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    scales = torch.zeros(-(-param.numel() // 256), device=param.device)
                    codes = torch.zeros_like(param, dtype=torch.uint8)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name], state[f"{name}_absmax"] = codes.clone(), scales.clone()
                    state["step"] = torch.zeros((), dtype=torch.float64, device=param.device)
                names = ("exp_avg", "exp_avg_absmax", "exp_avg_sq", "exp_avg_sq_absmax", "step")
                lists = [[param], [param.grad], *([state[name]] for name in names)]
                headroom.functional.adamw8bit_(*lists, beta1=beta1, beta2=beta2, **options)


class Twins:
    """Two optimizers over parameters of equal values. What is done to one is done to the other."""

    def __init__(self, shapes=((4, 4), (7,), ()), name="AdamW", device="cpu", **options):
        start = [torch.randn(shape).to(device) for shape in shapes]
        self.ours = [torch.nn.Parameter(value.clone()) for value in start]
        self.theirs = [torch.nn.Parameter(value.clone()) for value in start]
        self.options = {"lr": 1e-2, "weight_decay": 0.1} | options
        small = {"min_8bit_size": 0} if name == "AdamW8bit" else {}
        self.optimizer = getattr(headroom.optim, name)(self.ours, **self.options, **small)
        loop = Loop8bit if small else getattr(torch.optim, name)
        self.other = loop(self.theirs, foreach=False, **copy.deepcopy(self.options))
        self.tolerance = EQUAL if small else CLOSE
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
        tolerance = EQUAL if self.tolerance is EQUAL else CLOSE | tolerance
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
