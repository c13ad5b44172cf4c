"""Losses in CUDA graphs: a replay has the bits of an eager step on what the inputs hold by then."""

import headroom
import pytest
import torch
from headroom.functional import cross_entropy, divergence

from helpers.captured import captured

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS, FEATURES, CLASSES = 203, 40, 1500
DTYPES = (torch.float32, torch.bfloat16)


def linear(hidden, weight, target, **options):
    return headroom.linear_cross_entropy(hidden, weight, target, z_loss=0.01, **options)


LOSSES = {
    "linear, tokens": lambda x, w, y: linear(x, w, y, mode="tokens", workspace=50 * CLASSES * 4),
    "linear, vocabulary": lambda x, w, y: linear(x, w, y, mode="vocabulary", workspace=1),
    "linear, rows": lambda x, w, y: linear(x, w, y, reduction="none").sum(),
    "linear": linear,
    "cross entropy": lambda x, w, y: cross_entropy(x @ w.T, y, label_smoothing=0.1),
    "divergence": lambda x, w, y: divergence(x @ w.T, (x @ w.T).detach().roll(1, 0), y),
}


def inputs(seed, dtype):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, w = (
        torch.randn(n, FEATURES, device="cuda", dtype=dtype, generator=generator)
        for n in (ROWS, CLASSES)
    )
    y = torch.randint(0, CLASSES, (ROWS,), device="cuda", generator=generator)
    y[seed :: 3 + seed] = -100  # each time other rows count
    return x, w, y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_replay_has_the_bits_of_an_eager_step(loss, dtype):
    x, w, y = inputs(0, dtype)
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def step():
        result = LOSSES[loss](*leaves, y)
        return result.detach(), *torch.autograd.grad(result, leaves)

    graph, results = captured(step)
    for seed in (1, 2):
        with torch.no_grad():
            for old, new in zip((x, w, y), inputs(seed, dtype)):
                old.copy_(new)
        graph.replay()
        for got, wanted in zip(results, step()):
            assert torch.equal(got, wanted)


def test_a_check_of_targets_in_a_capture_is_refused():
    x, w, y = inputs(0, torch.float32)
    linear(x, w, y, check_target=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="check_target is 1, but the stream is being captured"):
        with torch.cuda.graph(graph):
            linear(x, w, y, check_target=True)
    assert linear(x, w, y).isfinite()
