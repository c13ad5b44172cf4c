"""Lightning: an optimizer that ``configure_optimizers`` returns, and a budget."""

# /// script
# dependencies = ["lightning==2.6.6"]
# ///

import headroom
import lightning
import torch
from _small import assert_same_losses, batches, network
from headroom.integrations.lightning import FitCallback


class Module(lightning.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.model, self.make, self.losses = network(), optimizer, []

    def training_step(self, x, _):
        loss = (self.model(x) - x).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=1e-3)


def run(optimizer, *callbacks):
    module = Module(optimizer)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.cat(batches()), batch_size=16))
    return [loss.item() for loss in module.losses[-6:]]


reference = run(torch.optim.AdamW)
assert_same_losses(run(headroom.optim.AdamW), reference)
budget = FitCallback(budget="2 MiB", tell=lambda text: None)
assert_same_losses(run(headroom.optim.AdamW, budget), reference)
assert budget.fitted is not None
