"""torch's schedulers of learning rates on Headroom's optimizers."""

import pytest
import torch
from torch.optim import lr_scheduler

from helpers.loops import ADAMW, assert_close, batches, build, plain_run

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle, which moves beta1 too": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "cyclic, which moves beta1 too": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, 3),
    "warm-up, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, tensor_lr, recwarn):
    (model, _, rates), (other, _, theirs) = (
        plain_run(batches(8), cls, SCHEDULERS[name], lr=torch.tensor(1e-2) if tensor_lr else 1e-2)
        for cls in (ADAMW, torch.optim.AdamW)
    )
    assert rates == theirs and len({rate for rate, _ in rates}) > 1
    assert_close(model, other)
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_plateau_scheduler():
    optimizer = ADAMW(build().parameters(), lr=1e-2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 2.5e-3
