"""Pairs of optimizers for an eager and a compiled run, and steps under torch.compile."""

import headroom
import pytest
import torch
from torch._dynamo.utils import counters

from helpers.bits import assert_same_bits

INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
EIGHT_BIT = {"cls": headroom.optim.AdamW8bit, "min_8bit_size": 5}  # of one parameter of four


def compile_step(optimizer, backend, fullgraph=True):
    return torch.compile(lambda: optimizer.step(), backend=backend, fullgraph=fullgraph)


def graphs():
    """How many graphs this test has compiled."""
    return counters["stats"]["unique_graphs"]


def pair(
    cls=headroom.optim.AdamW, dtype=torch.float32, shapes=((5, 7), (3,), (), (0, 2)), **options
):
    """Two optimizers on equal parameters, for an eager and a compiled run."""
    both = []
    for _ in range(2):
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        both.append((params, cls(params, **copies)))
    return both


def set_grads(*lists, seed):
    for params in lists:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def assert_same_run(eager, compiled):
    assert_same_bits(eager[0], compiled[0])
    for p, q in zip(eager[0], compiled[0]):
        assert_same_bits(eager[1].state[p].values(), compiled[1].state[q].values())
        assert eager[1].state[p].keys() == compiled[1].state[q].keys()
