"""The loop of a training run, and a backward inside backward."""

import torch


def train(optimizer, steps, backward):
    """``backward(step)`` makes the gradients of a step, which depend on nothing but its number."""
    for step in steps:
        optimizer.zero_grad()
        backward(step)
        optimizer.step()


class Nested(torch.autograd.Function):
    """A backward inside backward, with a gradient of the same parameters."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.layer(torch.ones(2, 3)).sum().backward()
        return grad, None
