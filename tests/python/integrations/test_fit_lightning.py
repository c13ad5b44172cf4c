"""The Trainer of Lightning within a budget of memory."""

import pkgutil
import re
from importlib.metadata import entry_points
from pathlib import Path

import headroom
import pytest
import torch
from headroom.fitting import DoesNotFit
from headroom.fitting.search import candidates
from headroom.nn import Linear4bit
from torch.utils.data import DataLoader

from helpers.bits import assert_same_bits
from helpers.few_bits import freeze
from helpers.fitting import samples, stack
from helpers.loops import QUIET

lightning = pytest.importorskip("lightning")

from headroom.integrations.lightning import FitCallback, fit_optimizer  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = stack()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch)["loss"]
        self.log("loss", loss, on_step=True)
        self.log("steps", float(self.trainer.global_step))
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Losses(lightning.Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, *given):
        self.found.append(float(outputs["loss"]))


def trained(folder, *callbacks, resume=None, steps=4, module=None, **options):
    """The losses, the module and the Trainer after some steps."""
    torch.manual_seed(4)
    module = module or Module()
    losses = Losses()
    trainer = lightning.Trainer(
        **QUIET,
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[losses, *callbacks],
        **{"gradient_clip_val": 0.5} | options,
    )
    trainer.fit(module, DataLoader(samples(16), batch_size=2, shuffle=True), ckpt_path=resume)
    return losses.found, module, trainer


@pytest.fixture(scope="module")
def most(tmp_path_factory):
    """The peak that is predicted for the model as it is."""
    callback = FitCallback("1 GiB", tell=lambda text: None)
    trained(tmp_path_factory.mktemp("most"), callback, steps=1)
    return callback.fitted.before_peak


def test_levels_leave_the_bits_the_order_and_the_random_numbers(most, tmp_path):
    want, other, _ = trained(tmp_path)
    told = []
    callback = FitCallback(int(0.7 * most), tell=told.append)
    losses, module, _ = trained(tmp_path, callback)
    assert "L5" in callback.fitted.choice.levels
    assert losses == want
    assert_same_bits(module.parameters(), other.parameters())
    assert callback.measured.peak <= callback.budget
    assert len(told) == 2 and "L5" in told[0] and "measured peak" in told[1]


@pytest.mark.slow
def test_accumulation_and_a_resumed_run(most, tmp_path):
    told = []
    callback = FitCallback(int(0.9 * most), tell=told.append)
    _, _, half = trained(tmp_path, callback, steps=2, accumulate_grad_batches=2)
    assert callback.fitted.choice.micro_batches == 2
    half.save_checkpoint(tmp_path / "half.ckpt")
    callback = FitCallback(int(0.9 * most), tell=told.append)
    options = dict(resume=tmp_path / "half.ckpt", accumulate_grad_batches=2)
    losses, module, trainer = trained(tmp_path, callback, **options)
    assert trainer.global_step == 4 and len(losses) == 4
    assert "L5" in callback.fitted.choice.levels


class Asks(Module):
    """A module that takes the optimizer that is chosen, if one is."""

    def configure_optimizers(self):
        optimizer = fit_optimizer(self, torch.optim.AdamW(self.parameters(), lr=1e-2))
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


def test_the_optimizer_is_chosen_before_its_schedule_is_made(tmp_path, monkeypatch):
    """A resumed run takes it again, without being allowed to choose it and without measuring."""
    want, other, _ = trained(tmp_path, module=Asks())
    assert type(other.optimizers()._optimizer) is torch.optim.AdamW
    told = []
    callback = FitCallback("1 GiB", ("8bit",), tell=told.append)
    callback.choice = {"optimizer": "8bit", "weights": "given"}  # as of a checkpoint
    losses, module, whole = trained(tmp_path, callback, module=Asks())
    assert losses == pytest.approx(want, rel=0.05)
    optimizer = whole.optimizers[0]
    assert type(optimizer).__name__ == "AdamW8bit" and callback.fitted.optimizer is optimizer
    assert whole.lr_scheduler_configs[0].scheduler.optimizer is optimizer
    assert len(told) == 2 and "measured peak" in told[1]
    first = FitCallback("1 GiB", ("8bit",), tell=told.append)
    first.choice = callback.choice
    _, _, half = trained(tmp_path, first, module=Asks(), steps=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    second = FitCallback("1 GiB", tell=told.append)
    options = dict(resume=tmp_path / "half.ckpt", module=Asks())
    with monkeypatch.context() as patched:
        patched.setattr(candidates, "measure_blocks", None)
        _, resumed, trainer = trained(tmp_path, second, **options)
    assert second.fitted.is_given and second.fitted.choice == first.fitted.choice
    assert second.fitted.choice.optimizer == "8bit" and trainer.global_step == 4
    state = trainer.optimizers[0].state.values()
    assert all(entry["step"] == 4 for entry in state)
    again = FitCallback("1 GiB", tell=told.append)
    trained(tmp_path, again, module=Asks(), steps=1)
    with pytest.raises(RuntimeError, match="has fitted a training already"):
        trained(tmp_path, again, module=Asks(), steps=1)


@pytest.mark.slow
def test_the_most_batches_that_any_epoch_accumulates_are_planned(tmp_path):
    schedule = lightning.pytorch.callbacks.GradientAccumulationScheduler({3: 2})
    callback = FitCallback("1 GiB", tell=lambda text: None)
    trained(tmp_path, schedule, callback, steps=1)
    assert callback.fitted.choice.micro_batches == 2


def test_one_callback_is_of_one_module(tmp_path):
    callback = FitCallback("1 GiB", tell=lambda text: None)
    _, module, _ = trained(tmp_path, callback, steps=1)
    trained(tmp_path, callback, steps=1, module=module)
    with pytest.raises(RuntimeError, match="FitCallback: it has fitted the training of another"):
        trained(tmp_path, callback, steps=1)


def test_what_is_refused(tmp_path):
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    callback = FitCallback("1 GiB")
    with pytest.raises(ValueError, match="FitCallback: the module optimizes by itself"):
        trained(tmp_path, callback, module=Manual(), gradient_clip_val=None)
    with pytest.raises(ValueError, match="budget is 1.00 KiB, and the loop itself holds"):
        trained(tmp_path, FitCallback("1 KiB"))


class Adam(Module):
    def training_step(self, batch):  # which may leave the index out
        return super().training_step(batch, 0)

    def configure_optimizers(self):
        return fit_optimizer(self, torch.optim.AdamW(self.parameters(), lr=1e-2))


@pytest.mark.slow
def test_the_host_holds_what_the_device_has_no_room_for(most, tmp_path):
    small = FitCallback("100 KiB", tell=lambda text: None)
    with pytest.raises(DoesNotFit) as caught:
        trained(tmp_path, small, module=Adam())
    budget = int(0.95 * caught.value.least) + small.extra
    callback = FitCallback(budget, host_budget="1 GiB", tell=lambda text: None)
    _, _, trainer = trained(tmp_path, callback, module=Adam())
    assert callback.fitted.choice.offload
    assert trainer.optimizers[0].offload_handle.memory().host > 0
    assert callback.measured.peak <= callback.budget
    again = FitCallback(callback.budget, host_budget=1 << 30)
    again.load_state_dict(callback.state_dict())
    assert again._again(again.choice, *again._kept_budgets) == callback.choice


class Frozen(Module):
    """A module whose matrices are frozen, and whose optimizer has the others alone."""

    def __init__(self):
        super().__init__()
        freeze(self)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_a_module_is_quantized_before_a_run_with_frozen_weights_in_few_bits_resumes(tmp_path):
    first = FitCallback("1 GiB", "nf4", tell=lambda text: None)
    first.choice = {"frozen": "nf4"}  # as if there had been less memory
    _, module, half = trained(tmp_path, first, module=Frozen(), steps=2)
    assert first.fitted.choice.frozen == "nf4" and isinstance(module.model.layers[0].up, Linear4bit)
    half.save_checkpoint(tmp_path / "half.ckpt")
    module = Frozen()
    headroom.quantize(module)
    second = FitCallback("1 GiB", tell=lambda text: None)
    _, _, whole = trained(tmp_path, second, module=module, resume=tmp_path / "half.ckpt")
    assert whole.global_step == 4 and second.fitted.choice.frozen == "given"
    assert any("are quantized already" in note for note in second.fitted.notes)


def test_the_environment_asks_for_a_budget(tmp_path, monkeypatch):
    """By an entry point of Lightning, silently without one, and beside a callback of the program
    once."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    group = (
        r'^\[project\.entry-points\."lightning\.pytorch\.callbacks_factory"\]\nheadroom = "(.+?)"'
    )
    made = pkgutil.resolve_name(re.search(group, text, re.MULTILINE)[1])
    monkeypatch.delenv("HEADROOM_BUDGET", raising=False)
    assert made() == []
    monkeypatch.setenv("HEADROOM_BUDGET", "1 GiB")
    monkeypatch.setenv("HEADROOM_HOST_BUDGET", "2 MiB")
    (alone,) = made()
    assert (alone.budget, alone.host_budget) == ("1 GiB", "2 MiB")
    monkeypatch.delenv("HEADROOM_HOST_BUDGET")
    told = []
    own = FitCallback("1 GiB", tell=told.append)
    # Where Headroom is installed the Trainer asks the entry point itself.
    asked = entry_points(group="lightning.pytorch.callbacks_factory", name="headroom")
    _, _, trainer = trained(tmp_path, own, *([] if asked else made()))
    (other,) = (c for c in trainer.callbacks if isinstance(c, FitCallback) and c is not own)
    assert own.fitted is other.fitted is not None and other.choice == own.choice
    assert sum("measured peak" in text for text in told) == 1
