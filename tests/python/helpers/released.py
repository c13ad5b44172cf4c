"""A model, optimizers and scalers for tests of steps inside backward."""

import functools

import headroom
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from helpers.bits import assert_same_bits

OPTIM = headroom.optim
SCALER = functools.partial(headroom.amp.GradScaler, "cpu", init_scale=2.0**8, growth_interval=2)
TORCH_SCALER = functools.partial(torch.amp.GradScaler, "cpu", init_scale=2.0**8, growth_interval=2)
BUCKETS = pytest.mark.parametrize("bucket_bytes", [0, 200, 1 << 22])
OPTIMIZERS = {
    "AdamW": functools.partial(OPTIM.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam, amsgrad, bf16": functools.partial(
        OPTIM.Adam, weight_decay=0.1, amsgrad=True, maximize=True, state_dtype=torch.bfloat16
    ),
    "AdamW8bit": functools.partial(OPTIM.AdamW8bit, lr=1e-2, min_8bit_size=10),
    "AdamW8bit, skip_step": functools.partial(
        OPTIM.AdamW8bit, lr=1e-2, min_8bit_size=10, nonfinite="skip_step"
    ),
    "AdamW8bit, skip_element": functools.partial(
        OPTIM.AdamW8bit,
        lr=1e-2,
        min_8bit_size=0,
        nonfinite="skip_element",
        code_rounding="stochastic",
    ),
}
EVERY = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))


class Net(torch.nn.Module):
    """A weight used twice and one in a checkpoint, odd shapes, one parameter without a gradient."""

    def __init__(self, reentrant=False):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, 17)
        self.middle = torch.nn.Linear(17, 17, bias=False)
        self.norm = torch.nn.LayerNorm(17)
        self.last = torch.nn.Linear(17, 3)
        self.unused = torch.nn.Parameter(torch.randn(4))
        self.reentrant = reentrant
        self.drop = torch.nn.Dropout(0.0)

    def forward(self, x):
        x = self.middle(torch.tanh(self.middle(self.first(x))))
        x = checkpoint(self.norm, x, use_reentrant=self.reentrant)
        return self.last(self.drop(x))


def loss_of(net, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 5, generator=generator).to(net.first.weight)
    y = torch.randn(6, 3, generator=generator).to(net.first.weight)
    return scale * mse_loss(net(x.requires_grad_()), y)


def pair(make, net=Net, **options):
    """The same model and optimizer twice, the second released."""
    nets = net(), net()
    optimizers = [make(groups(n)) for n in nets]
    return nets, optimizers, OPTIM.release_gradients(nets[1], optimizers[1], **options)


def groups(net):
    params = list(net.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]


def assert_equal(nets, optimizers):
    assert_same_bits(nets[0].parameters(), nets[1].parameters())
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        left, right = (o.state.get(x, {}) for o, x in zip(optimizers, (p, q)))
        assert left.keys() == right.keys()
        assert_same_bits(left.values(), right.values())


def train(net, optimizer, steps=range(3), **options):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        loss_of(net, step, **options).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
