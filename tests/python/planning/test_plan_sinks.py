"""Plans of attention with sinks: what is kept grows with the tokens, not with their squares."""

import headroom
import pytest
import torch
from headroom.functional import sink_attention
from headroom.memory import track
from torch import nn

from helpers.moe_models import moe_of, tokens_of

TOKENS = 1024
CASES = {
    "full": {},
    "window": {"window": 128},
    "all ways": {"causal": False},
}


class Layer(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.qkv = nn.Linear(256, 16 * 64)  # 8 heads, and 4 of keys and of values
        self.sinks = nn.Parameter(torch.randn(8))
        self.options = options

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, 64)).transpose(1, 2).split([8, 4, 4], 1)
        out = sink_attention(*heads, self.sinks, **self.options)
        return out.transpose(1, 2).flatten(2)[..., :256]


def layers(case):
    return nn.Sequential(Layer(CASES[case]), Layer(CASES[case]))


def loss(model, x):
    return model(x).float().square().mean()


def measured(model, batch, forward):
    with track(model, batch=batch, stacks=False) as tracked:
        for _ in range(2):
            forward(model, batch).backward()
            model.zero_grad()
    return tracked.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_a_step_takes(case, dtype):
    model = layers(case).to(dtype)
    x = torch.randn(1, TOKENS, 256, dtype=dtype)
    plan = headroom.plan(model, None, x, forward=loss)
    peak = measured(model, x, loss)
    assert plan.peak_bytes == pytest.approx(peak, abs=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_with_many_tokens(dtype):
    """Eager attention keeps the probabilities of 4 heads, 2 rows and 256 x 257 tokens."""
    model, batch = moe_of("GptOss").to(dtype), tokens_of(256)
    forward = lambda model, batch: model(**batch).loss  # noqa: E731
    eager = headroom.plan(model, None, batch)
    assert eager.peak_bytes > 2 * 8 * 256 * 257 * dtype.itemsize  # in two layers
    headroom.patch(model)
    plan = headroom.plan(model, None, batch)
    assert plan.peak_bytes == pytest.approx(measured(model, batch, forward), rel=1e-4)
    assert plan.peak_bytes < eager.peak_bytes / 4
