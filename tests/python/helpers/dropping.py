"""Small models for what lies on the host between the passes: one with every save level, and blocks
that drop some of their elements."""

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
