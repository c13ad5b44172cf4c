"""Gradients for headroom::unscale_norm_ and headroom::grad_norm, and their norms in float64."""

import headroom
import numpy as np
import pytest
import torch

from helpers.samples import FLOATS

SHAPES = ((37, 5), (), (1,), (16385,), (64,))
UNSCALE, MEASURE = headroom.functional.unscale_norm_, headroom.functional.grad_norm
OPS = pytest.mark.parametrize("op", [UNSCALE, MEASURE], ids=["unscale_norm_", "grad_norm"])


def gradients(shapes=SHAPES, dtypes=FLOATS, device="cpu", seed=0):
    """Normal values; the dtypes take turns."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [g.to(device, dtypes[k % len(dtypes)]) for k, g in enumerate(values)]


def results(count, device="cpu"):
    """Outputs full of 7, so that what is not written shows."""
    full = {"norm": (), "norms": (count,), "found_inf": (1,), "clip": ()}
    out = {name: torch.full(shape, 7.0, device=device) for name, shape in full.items()}
    return out | {"culprit": torch.full((), 7, dtype=torch.int64, device=device)}


def norm64(tensors, p):
    flat = torch.cat([t.detach().double().flatten() for t in tensors])
    return torch.linalg.vector_norm(flat, p).item() if flat.numel() else 0.0


def ulps_off(got, exact):
    """The error in units of the last place of float32."""
    exact32 = np.float32(exact)
    return abs(float(got) - exact) / float(np.spacing(exact32)) if exact32 else abs(float(got))


def limit(device, p=2.0):
    """The largest such error of a norm."""
    return 1 if device == "cpu" or p != 2 else 4
