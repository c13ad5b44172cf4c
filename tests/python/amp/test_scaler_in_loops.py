"""headroom.amp.GradScaler in the training loops of accelerate and Lightning."""

import math

import pytest
import torch
from torch.amp import GradScaler as TorchScaler

from helpers.bits import bits
from helpers.scalers import OURS, Scaler, parameters


@pytest.mark.parametrize("scaler_class", [TorchScaler, Scaler], ids=["its own", "ours"])
def test_accelerate_sees_a_skipped_step(scaler_class, monkeypatch):
    """And its scheduler does not move. Its fp16 mode needs a GPU, so the scaler is put in."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = scaler_class("cpu")
    model = torch.nn.Linear(3, 2)
    optimizer = OURS(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert optimizer.scaler is accelerator.scaler
    seen = []
    for bad in (False, True, False, True):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        accelerator.backward(loss)
        if bad:
            next(model.parameters()).grad[0, 0] = math.inf
        before = [bits(p).clone() for p in model.parameters()]
        optimizer.step()
        scheduler.step()
        moved = not all(torch.equal(bits(p), b) for p, b in zip(model.parameters(), before))
        assert moved is not bad
        seen.append((optimizer.step_was_skipped, scheduler.get_last_lr()[0]))
    assert seen == [(False, 0.05), (True, 0.05), (False, 0.025), (True, 0.025)]
    assert accelerator.scaler.get_scale() == 2.0**14


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_clips_with_our_optimizer(precision, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.norms = []

        def training_step(self, batch, _):
            return 100 * self.layer(batch[0]).square().mean()

        def on_before_optimizer_step(self, optimizer):
            pass

        def configure_gradient_clipping(self, optimizer, **options):
            super().configure_gradient_clipping(optimizer, **options)
            flat = torch.cat([p.grad.flatten() for p in self.parameters()])
            self.norms.append(flat.norm().item())

        def configure_optimizers(self):
            return OURS(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4))
    module = Module()
    before = [p.detach().clone() for p in module.parameters()]
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    assert module.norms == pytest.approx([0.5] * 4, rel=1e-3)
    assert not any(torch.equal(p, b) for p, b in zip(module.parameters(), before))


def test_lightning_takes_the_scaler():
    """Its own plugin, on the CPU: 16-mixed of the Trainer is for GPUs."""
    precision = pytest.importorskip("lightning.pytorch.plugins.precision")
    plugin = precision.MixedPrecision("16-mixed", "cpu", scaler=Scaler("cpu"))
    optimizer = OURS(parameters())
    plugin.clip_gradients(optimizer, 0.5)  # raises for optimizers that say they unscale
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        plugin.clip_gradients(torch.optim.AdamW(parameters(), fused=True), 0.5)


def test_our_optimizers_do_not_claim_to_unscale():
    """Which would make accelerate and Lightning take the paths that fail."""
    assert not getattr(OURS(parameters()), "_step_supports_amp_scaling", False)
