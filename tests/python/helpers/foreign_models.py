"""Small models of other people's shapes, for tests of what is recognized in them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, FEATURES = 32, 48


class RMSNorm(nn.Module):
    """As in the original code of Llama."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


class FeedForward(nn.Module):
    """As in the original code of Llama, with the dropout of its successors."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, FEATURES, bias=False)
        self.w2 = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, FEATURES, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class LayerNorm(nn.Module):
    """As in nanoGPT: with a bias or without, and with its epsilon in the code."""

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)
        self.bias = nn.Parameter(torch.randn(dim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.causal = causal

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(o.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, norm, mlp, causal: bool = True) -> None:
        super().__init__()
        self.norm_1, self.attention = norm(), Attention(causal)
        self.norm_2, self.mlp = norm(), mlp()

    def forward(self, x, scale=1.0):
        x = x + self.attention(self.norm_1(x)) * scale
        return x + self.mlp(self.norm_2(x))


class Language(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self, norm, mlp, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, HIDDEN)
        self.layers = nn.ModuleList(Layer(norm, mlp) for _ in range(depth))
        self.norm, self.head = norm(), nn.Linear(HIDDEN, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(self.norm(x))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, 4, 4)
        self.blocks = nn.Sequential(
            *(Layer(lambda: nn.LayerNorm(HIDDEN, eps=1e-6), plain_mlp, False) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.layer1 = nn.Sequential(Residual(8), Residual(8))
        self.norm, self.fc = nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, images):
        return self.fc(self.norm(self.layer1(self.stem(images))).mean((2, 3)))


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, FEATURES), nn.GELU(), nn.Linear(FEATURES, HIDDEN))


def llama(dropout: float = 0.0) -> nn.Module:
    return Language(lambda: RMSNorm(HIDDEN), lambda: FeedForward(dropout))


def nano_gpt() -> nn.Module:
    return Language(lambda: LayerNorm(HIDDEN, bias=True), plain_mlp)


def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (2, 9))


def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


def outputs_and_gradients(model, *inputs, **named):
    """The result and the gradients of all parameters, of a loss that is the same in any dtype."""
    torch.manual_seed(5)
    model.zero_grad()
    y = model(*inputs, **named)
    y = y if isinstance(y, torch.Tensor) else y[0]
    factors = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y)
    (y * factors).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def in_float64(model, *inputs, **named):
    exact = copy.deepcopy(model).double()
    wide = (x.double() if x.is_floating_point() else x for x in inputs)
    return outputs_and_gradients(exact, *wide, **named)


def assert_as_good(ours, theirs, exact):
    """At most twice the error of the model as it was, with half a rounding of every value free."""
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert len(ours) == len(exact)
    for k, (a, b, value) in enumerate(zip(ours, theirs, exact)):
        unit = torch.finfo(a.dtype).eps * value.norm() / 2
        error, other = (a.double() - value).norm(), (b.double() - value).norm()
        assert error <= 2 * other + unit, f"tensor {k}: {error} against {other}"
