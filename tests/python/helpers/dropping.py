"""Small models for what lies on the host between the passes: one with every save level, and blocks
that drop some of their elements, or save what is written later."""

import headroom
import torch
from torch import nn
from torch.nn import functional as F


def transformer(save="L0", **options):
    torch.manual_seed(0)
    config = headroom.nn.TransformerConfig(
        vocab_size=50, hidden_size=24, layers=4, heads=2, features=40, **options
    )
    return headroom.nn.Transformer(config, save=save)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 20), nn.Linear(20, 8), nn.LayerNorm(8)

    def forward(self, x):
        hidden = F.dropout(F.gelu(self.first(self.norm(x))), 0.2, self.training)
        return x + self.second(hidden)


class _NoisyLeak(torch.autograd.Function):
    """Saves memory that its caller fills, which moves no version."""

    @staticmethod
    def forward(ctx, x, noise):
        ctx.save_for_backward(x, noise)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        x, noise = ctx.saved_tensors
        return grad * noise * x.sign(), None


def _filled_behind(x):
    noise = torch.full_like(x, 7.0)
    y = _NoisyLeak.apply(x, noise)
    noise.data.uniform_()
    return y * 2.0


# Functions that save a tensor before it is written.
WRITTEN_LATE = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "in place": lambda x: F.rrelu(x * 2.0, training=True, inplace=True),
    "given noise": lambda x: torch.ops.aten.rrelu_with_noise(
        x, x.new_zeros(x.shape), training=True
    ),
    "a program": _filled_behind,
}


class WrittenLate(nn.Module):
    """One of these functions alone, or between and behind other layers."""

    def __init__(self, name, place="end"):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.place = WRITTEN_LATE[name], place
        self.first, self.second = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x):
        if self.place == "alone":
            return self.function(x)
        x = self.second(self.function(self.first(x)))
        return self.function(x) if self.place == "end" else x


def gradients_of(run, model):
    """Of the input and of the parameters, where random numbers are drawn from the same seed."""
    torch.manual_seed(1)
    x = torch.randn(6, 8, requires_grad=True)
    run(model, x).square().sum().backward()
    return [x.grad] + [p.grad for p in model.parameters() if p.grad is not None]
