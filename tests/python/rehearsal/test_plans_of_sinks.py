"""Plans of attention with sinks beside torch's allocator."""

import gc

import headroom
import pytest
import torch
from headroom.functional import sink_attention
from torch import nn

from helpers.moe_models import moe_of, tokens_of

pytestmark = pytest.mark.cuda
TOKENS = 640
ENDS = torch.tensor([0, 100, 320, 500, TOKENS], dtype=torch.int32)
CASES = {
    "full": (torch.bfloat16, {}),
    "window": (torch.bfloat16, {"window": 128}),
    "packed": (torch.bfloat16, {"cu_seqlens": ENDS, "longest": 220}),
    "efficient": (torch.float32, {}),
}


class Heads(nn.Module):
    """Has nothing but queries, keys and values, so that their gradients are the peak."""

    def __init__(self, kv_heads):
        super().__init__()
        sizes = {"q": 8, "k": kv_heads, "v": kv_heads}
        for name, count in sizes.items():
            heads = torch.randn(1, TOKENS, count, 64)
            self.register_parameter(name, nn.Parameter(heads))
        self.sinks = nn.Parameter(torch.randn(8))

    def forward(self, options):
        heads = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        return sink_attention(*heads, self.sinks, **options)


def reached(model, batch, forward):
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        forward(model, batch).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_the_allocator_reaches(case, kv_heads, runtime):
    dtype, options = CASES[case]
    model = Heads(kv_heads).to("cuda", dtype)
    batch = {k: v.cuda() if k == "cu_seqlens" else v for k, v in options.items()}
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    plan = headroom.plan(model, None, batch, forward=loss)
    # Blocks of the allocator have 512 bytes.
    print(plan.allocated_bytes, reached(model, batch, loss))
    assert plan.allocated_bytes == pytest.approx(reached(model, batch, loss), abs=1024)


def test_gpt_oss_beside_the_allocator(runtime):
    model, batch = moe_of("GptOss").bfloat16().cuda(), tokens_of(256)
    batch = {name: x.cuda() for name, x in batch.items()}
    forward = lambda model, batch: model(**batch).loss  # noqa: E731
    found = []
    for patch in (lambda model: None, headroom.patch):
        patch(model)
        found.append(headroom.plan(model, None, batch).allocated_bytes)
        assert found[-1] == pytest.approx(reached(model, batch, forward), abs=1024)
    assert found[0] - found[1] > 2 * 2 * 4 * 256 * 257 * 2  # probabilities of two layers
