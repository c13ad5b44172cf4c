"""Patches a model that exists: the same function of the same weights, which keeps less for the
backward pass; and takes the patch back."""

import headroom
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, activation="gelu", batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
x = torch.randn(4, 128, 64)


def saved() -> int:
    return headroom.memory.saved(model, x).bytes


loss, before = model(x).square().mean().item(), saved()
print(headroom.patch(model, save="L5"))
assert abs(model(x).square().mean().item() - loss) < 1e-4
print(f"kept for the backward pass: {before / 2**20:.1f} MiB, patched {saved() / 2**20:.1f} MiB")
headroom.unpatch(model)
