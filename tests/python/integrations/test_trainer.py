"""The Trainer of transformers, profiled."""

import headroom
import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module
from torch.profiler import schedule

pytest.importorskip("transformers")

from helpers.trainers import trainer_of  # noqa: E402


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 5)

    def forward(self, x):
        return {"loss": self.inner(x).square().mean()}


def test_steps_of_the_trainer_are_recorded(tmp_path):
    import transformers

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            prof.step()

    model = Model()
    dataset = [{"x": torch.randn(7)} for _ in range(24)]
    options = dict(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    trainer = trainer_of(model, dataset, tmp_path, **options)
    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with headroom.profile(None, model=model, schedule=plan, peak_flops=1e12) as prof:
        trainer.add_callback(Steps())
        trainer.train()
    assert [step.number for step in prof.result.steps] == [2, 3]
    inner = next(row for row in prof.result.modules if row.name == "inner")
    assert inner.calls == 2 * 2  # micro-batches
    assert inner.total.model_flops == 2 * 2 * (2 * 2 * 3 * 7 * 5)  # no gradient of the batch
    assert not every_module._global_forward_hooks
