"""Plans of models, dtypes and techniques for each device: none raises, recomputation takes no more
than none, and two ways to the same mathematics take the same."""

import functools

import headroom
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.combined import combinations

SIZE, ROWS, TOKENS = 64, 4, 96


class Block(nn.Module):
    def __init__(self, feature):
        super().__init__()
        self.feature = feature
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x):
        if "attention" in self.feature:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return F.dropout(x, 0.1, self.training) if "dropout" in self.feature else x


class Model(nn.Module):
    def __init__(self, feature, technique):
        super().__init__()
        self.technique = technique
        self.blocks = nn.ModuleList(Block(feature) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            if self.technique in ("reentrant", "non-reentrant"):
                reentrant = self.technique == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant)
            elif self.technique == "verified":
                x = headroom.checkpoint(block, x, verify=True)
            else:
                x = block(x)
        return x.float().square().mean()


@functools.cache
def peak(feature, technique, precision, device, first):
    """The peak, from the first of two points of view: where the input is a leaf that requires grad,
    a reentrant checkpoint has something to go backward to."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.device(first):
        model = Model(feature, technique).to(dtype)
        batch = torch.randn(ROWS, TOKENS, SIZE, dtype=dtype).requires_grad_()
    return headroom.plan(
        model,
        torch.optim.AdamW,
        (batch,),
        device=device,
        amp=torch.bfloat16 if precision == "amp" else None,
        checkpoint_every=1 if technique == "checkpoint_every" else None,
    ).peak_bytes


@combinations(
    {
        "feature": ["plain", "dropout", "attention", "attention and dropout"],
        "technique": ["none", "non-reentrant", "reentrant", "checkpoint_every", "verified"],
        "precision": ["f32", "bf16", "amp"],
        "device": ["cuda", "cpu"],
        "first": ["cpu", "meta"],
    },
)
def test_techniques_are_planned_for_every_device(case):
    got = peak(**case)
    assert got <= peak(**case | {"technique": "none"})
    if case["technique"] != "none":
        same = peak(**case | {"technique": "non-reentrant"})
        assert abs(got - same) <= 0.1 * same
    assert got == peak(**case | {"first": "cpu"})
    # The same kernels, but for the product with a bias and its parts; for those of 16 bits, a
    # processor without instructions for them takes scratch memory.
    if case["feature"] == "plain" and case["precision"] == "f32":
        other = peak(**case | {"device": "cpu" if case["device"] == "cuda" else "cuda"})
        assert abs(got - other) <= 0.15 * max(got, other)
