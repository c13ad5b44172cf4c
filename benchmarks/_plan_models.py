"""Small models of many shapes, in plain torch, for the benchmark of the planner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """Two convolutions with batch norms, and the way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.around = nn.Sequential()
        if stride > 1 or before != after:
            self.around = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """A ResNet-18 (He et al., 2016) with fewer channels."""

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, before = [], width
        for stage in range(3):
            after = width << stage
            for block in range(depth):
                stride = 2 if block == 0 and stage else 1
                stages.append(Residual(before, after, stride))
                before = after
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class EncoderBlock(nn.Module):
    """A pre-norm block of a vision transformer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2020)."""

    def __init__(
        self,
        width: int = 96,
        depth: int = 4,
        dropout: float = 0.0,
        recompute: bool = False,
        classes: int = 100,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 65, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, 4, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x[:, 0]))


class Experts(nn.Module):
    """A mixture of experts with a fixed capacity: each takes the tokens that want it most."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights = self.router(tokens).softmax(-1)
        capacity = 2 * len(tokens) // len(self.experts)
        result = torch.zeros_like(tokens)
        for expert, weight in zip(self.experts, weights.unbind(-1), strict=True):
            chosen, at = weight.topk(capacity)
            added = expert(tokens[at]) * chosen[:, None]
            result = result.index_add(0, at, added.to(result.dtype))
        return result.view_as(x)


class MoE(nn.Module):
    """A transformer whose every second MLP is a mixture of experts."""

    def __init__(self, width: int = 96, depth: int = 4, vocab: int = 1000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, 4, 0.0) for _ in range(depth))
        self.experts = nn.ModuleList(
            Experts(width, 4) if layer % 2 else nn.Identity() for layer in range(depth)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            x = x + experts(x)
        return self.head(x)


class TiedMLP(nn.Module):
    """Embeddings, two layers, and a head that is the embeddings again."""

    def __init__(self, width: int = 128, vocab: int = 4000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(ids)))
