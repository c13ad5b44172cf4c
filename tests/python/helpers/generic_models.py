"""Gated units that tests of headroom.patch share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from helpers import foreign_models as models

HIDDEN, FEATURES = models.HIDDEN, models.FEATURES


def kinds(report):
    return sorted(swap.kind for swaps in report.swapped.values() for swap in swaps)


class Unit(nn.Module):
    """A gated unit whose parts a test chooses."""

    def __init__(self, act=F.silu, drop: float | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FEATURES)
        self.up_proj = nn.Linear(HIDDEN, FEATURES)
        self.down_proj = nn.Linear(FEATURES, HIDDEN)
        self.act = act
        if drop is not None:
            self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
