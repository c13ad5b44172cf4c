"""Headroom's optimizers in the Trainer of Lightning."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.loops import OURS, QUIET, assert_same_run, batches, build, made
from helpers.modes import EVERY, entries

lightning = pytest.importorskip("lightning")


@OURS
def test_lightning(make, tmp_path):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = build()

        def training_step(self, batch, _):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            optimizer = make(self.parameters(), lr=1e-2)
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    data = torch.cat(batches(6))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=False)

    def trainer(epochs):
        return lightning.Trainer(
            max_epochs=epochs,
            **QUIET,
            gradient_clip_val=0.5,
            default_root_dir=tmp_path,
        )

    whole = Module()
    trainer(2).fit(whole, loader)
    half = trainer(1)
    half.fit(Module(), loader)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, second = Module(), trainer(2)
    second.fit(resumed, loader, ckpt_path=tmp_path / "half.ckpt")
    assert_same_bits(whole.model.parameters(), resumed.model.parameters())
    (optimizer,) = second.strategy.optimizers
    assert all(entry["step"] == 12 for entry in entries(optimizer))
    assert entries(optimizer)[0]["exp_avg"].dtype in (torch.bfloat16, torch.uint8)

    reference = build()
    other = make(reference.parameters(), lr=1e-2)
    for epoch in range(2):
        for x in data.split(8):
            other.zero_grad()
            reference(x).square().mean().backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            other.step()
        other.param_groups[0]["lr"] = 1e-2 * 0.5 ** (epoch + 1)
    assert_same_bits(reference.parameters(), whole.model.parameters())


@pytest.mark.parametrize("name", EVERY)
def test_lightning_resumes(name, tmp_path):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = modes.build(torch.bfloat16)

        def training_step(self, *_):
            return modes.loss_of(self.model, modes.batch(self.global_step))

        def configure_optimizers(self):
            return EVERY[name].make(self.parameters())

    def fit(steps, **options):
        trainer = lightning.Trainer(
            max_steps=steps,
            **QUIET,
            default_root_dir=tmp_path,
        )
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(torch.arange(3)), **options)
        return trainer, module.model

    fit(3)[0].save_checkpoint(tmp_path / "half.ckpt")
    trainer, model = fit(6, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    reference = made(name)
    modes.train(*reference, range(6))
    assert_same_run(model, trainer.strategy.optimizers[0], *reference)
