"""Parameters and gradients of random values."""

import torch


def parameter(*shape, **options):
    return torch.nn.Parameter(torch.randn(*shape, **options))


def with_grads(*params):
    for p in params:
        p.grad = torch.randn_like(p)
    return list(params)
