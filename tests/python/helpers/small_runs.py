"""A small model and its optimizer after a step."""

import headroom
import torch
from torch import nn


def trained(seed=0, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    optimizer = headroom.optim.AdamW(model.parameters())
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    return model, optimizer
