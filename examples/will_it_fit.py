"""Asks before the run whether a model will fit, and what would make it: no GPU, no memory taken."""

import headroom
import torch

config = headroom.nn.TransformerConfig(
    vocab_size=32000, hidden_size=4096, layers=4, heads=32, features=14336
)
with torch.device("meta"):  # a billion parameters, of which none is allocated
    model = headroom.nn.Transformer(config)
    ids = torch.zeros(4, 1024, dtype=torch.int64)


def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return headroom.functional.cross_entropy(model(ids), ids)


options = {"sample_batch": ids, "forward": loss, "device": "cuda"}
plan = headroom.plan(model, headroom.optim.AdamW, **options)
smaller = headroom.plan(model, headroom.optim.AdamW8bit, save="L2", **options)
print(plan)
print("fits in 16 GiB:", plan.fits("16 GiB"))
print(f"with 8-bit moments and blocks at L2: {smaller.total_bytes / 2**30:.1f} GiB")
