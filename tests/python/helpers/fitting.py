"""Small models whose training is fitted into a budget, in loops that others wrote."""

import torch
from headroom.memory import track
from headroom.nn import Transformer, TransformerConfig
from headroom.step.description import Step
from torch import nn

WIDTH, TOKENS = 32, 152


class Layer(nn.Module):
    """A block that no library knows, with random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks and a head; a mean over samples, so that equal parts of a batch have equal weight."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, target=None):
        for layer in self.layers:
            x = layer(x)
        output = self.head(x)
        if target is None:
            return output
        return {"loss": (output - target).square().mean()}


def stack(layers=4, dropout=0.1):
    torch.manual_seed(3)
    model = Stack(layers)
    for layer in model.layers:
        layer.dropout.p = dropout
    return model


def samples(count=24):
    """Rows of a dataset, in shapes that are not round."""
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "x": torch.randn(TOKENS - 1, WIDTH, generator=generator),
            "target": torch.randn(TOKENS - 1, 3, generator=generator),
        }
        for _ in range(count)
    ]


class Peak:
    """The live bytes of a training's first steps, by the exact counter, whoever runs it."""

    def __init__(self, steps=2):
        self._left = steps
        self._tracked = None

    def begin(self, model, optimizer):
        self._tracked = track(model, optimizer)
        self._tracked.__enter__()

    def step_ended(self):
        self._left -= 1
        if self._left == 0:
            self._tracked.__exit__(None, None, None)

    @property
    def bytes(self):
        return self._tracked.peak_bytes


def ours():
    """Returns a model of our blocks, and a batch: inputs and targets."""
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=96, hidden_size=32, layers=4, heads=4, features=88)
    tokens = torch.randint(0, 96, (6, 33))
    return Transformer(config), (tokens[:, :-1], tokens[:, 1:].contiguous())


def cross_entropy(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def step_of(model, batch, loss=None, forward=None, *, amp=None, optimizer=None):
    """Returns a step on the CPU."""
    return Step(model, optimizer, batch, loss, forward, torch.device("cpu"), amp)
