"""Plans with a GradAccumulator: sums are gradients, in plans as in runs."""

import headroom
import pytest
import torch
from headroom.memory import track
from torch import nn

PARAMETERS = 5 * (63 * 63 + 63)
STEPS, MICRO_BATCHES, BUCKET = 2, 3, 1 << 14


def mean(model, x):
    return model(x).float().mean()


def made():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(63, 63) for _ in range(5))).bfloat16()
    return model, headroom.optim.AdamW(model.parameters(), state_dtype=torch.float32)


def measured(x, release):
    model, optimizer = made()
    accumulator = headroom.GradAccumulator(model)
    if release:
        headroom.release_gradients(model, optimizer, accumulator=accumulator, bucket_bytes=release)
    with track(model, optimizer, batch=x, stacks=False) as tracked:
        for _ in range(STEPS):
            for _ in range(MICRO_BATCHES):
                with accumulator.micro_batch():
                    mean(model, x).backward()
            accumulator.finish()
            optimizer.step()
            optimizer.zero_grad()
    return tracked.timeline


@pytest.mark.parametrize("release", [False, BUCKET])
def test_sums_are_gradients(release):
    x = torch.randn(31, 63).bfloat16()
    plan = headroom.plan(
        *made(), x, forward=mean, accumulation=MICRO_BATCHES, accumulator=True, release=release
    )
    real = min((measured(x, release) for _ in range(2)), key=lambda t: t.peak_bytes)
    assert plan.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    gradients = plan.timeline.most_by_kind["gradients"]
    assert gradients == real.most_by_kind["gradients"]
    # Sums in float32, and gradients in bfloat16 before they are added, all or those of a bucket.
    if release:
        assert 4 * PARAMETERS < gradients < 6 * PARAMETERS
    else:
        assert gradients == 6 * PARAMETERS
    assert "accumulator on" in str(plan)
