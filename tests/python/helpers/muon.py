"""Matrices, where their updates lie, and the rules of Muon in a few lines of torch."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((31, 17), (5, 600), (0, 3), (1, 7), (300, 40))
JORDAN = [(3.4445, -4.7750, 2.0315)] * 5


def tensors(dtype=torch.float32, device="cpu", seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def places(dtype=torch.float32, device="cpu", gap=0, shapes=SHAPES):
    """Views for updates, each of a matrix of its own with no more rows than columns."""
    views = []
    for rows, cols in shapes:
        m, n = min(rows, cols), max(rows, cols)
        x = torch.full((m, n + gap), 7.0, dtype=dtype, device=device)[:, :n]
        views.append(x.T if rows > cols else x)
    return views


def orthogonalized(x, coefficients, eps=1e-7):
    """The iteration in float64 on matrices with no more rows than columns."""
    x = x.double()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
