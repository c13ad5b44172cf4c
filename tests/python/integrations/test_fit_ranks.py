"""Trainings of several ranks, fitted in the loops of others: one choice for all, and the trajectory
of one rank that has the whole batch."""

import importlib
import itertools
import math
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from headroom.fitting.ranks import RankError, gathered
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from helpers.bits import assert_same_bits
from helpers.fitting import samples, stack
from helpers.launched import as_by_torchrun, shared_folder
from helpers.loops import QUIET

STEPS, ROWS = 4, 8  # of each step, on all ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def imports(rank, *names):
    """Takes a time of its own, where machines are busy."""
    for name in names:
        importlib.import_module(name)


def assert_same_everywhere(fitted, model):
    choices = gathered(lambda: asdict(fitted.choice))
    assert choices[0] == choices[1]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = flat.clone()
    dist.broadcast(other, 0)
    assert torch.equal(flat, other)


def assert_near(model, want, tolerance):
    """The parameters, to a share of the way that they have gone."""
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    began, ended = want
    error = float((found - ended).norm() / (ended - began).norm())
    assert error <= tolerance, error


def flat(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def exchanges_of(model):
    """A list to which a model of DistributedDataParallel adds, whenever it exchanges gradients."""
    seen = []

    def exchange(state, bucket):
        seen.extend([True] * bucket.is_last())
        return allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, exchange)
    return seen


# ---- Trainer -------------------------------------------------------------------------------------


def language_rows(count=STEPS * ROWS):
    """Rows with very different numbers of labels that count."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for k in range(count):
        ids = torch.randint(3, 61, (12,), generator=generator)
        labels = ids.clone()
        labels[12 - 3 * (k % 4) :] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def language_model():
    from helpers.hf_models import model_of

    return model_of("Llama", num_hidden_layers=4)


TRAINER = dict(optim="sgd", learning_rate=0.3, max_steps=STEPS, warmup_steps=0)


def trainer_of_two(rank, want, accumulated):
    from transformers import TrainerCallback

    from helpers.trainers import forced, losses_of, rates_of, trainer_of

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **given):
            self.exchanges = exchanges_of(self.trainer.model_wrapped)

    def run(folder, resume=None, **options):
        told, watch = [], Watch()
        callback = forced(2, tell=told.append)
        options = (
            TRAINER
            | options
            | dict(
                per_device_train_batch_size=ROWS // 2 // accumulated,
                gradient_accumulation_steps=accumulated,
            )
        )
        callbacks = [callback, watch]
        trainer = trainer_of(language_model(), language_rows(), folder, callbacks, **options)
        watch.trainer = trainer
        trainer.train(resume_from_checkpoint=resume)
        assert len(told) == (0 if rank else 2)
        return trainer, callback.fitted, watch.exchanges

    with as_by_torchrun(), shared_folder() as folder:
        saves = dict(save_strategy="steps", save_steps=2)
        trainer, fitted, exchanges = run(folder, **saves)
        assert fitted.choice.micro_batches == 2 * accumulated
        assert trainer.args.gradient_accumulation_steps == 2 * accumulated
        assert trainer.args.world_size == 2 and len(exchanges) == STEPS
        assert_same_everywhere(fitted, trainer.model)
        assert_near(trainer.model, want[:2], 1e-3)
        # A rank of the first process logs the mean over the ranks.
        if rank == 0:
            assert losses_of(trainer) == pytest.approx(want[2], rel=1e-3)
        resumed, again, _ = run(folder, f"{folder}/checkpoint-2", **saves)
        assert again.choice == fitted.choice and again.is_given  # on both ranks
        assert rates_of(resumed) == rates_of(trainer)
        assert_near(resumed.model, (want[0], flat(trainer.model)), 1e-5)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_trainer_on_two_ranks(ranks, accumulated, tmp_path):
    from helpers.trainers import losses_of, trained

    model = language_model()
    began = flat(model)
    options = TRAINER | dict(per_device_train_batch_size=ROWS)
    whole = trained(model, language_rows(), tmp_path, **options)
    ranks(imports, "headroom.integrations.trainer_fit", "helpers.hf_models")
    ranks(trainer_of_two, (began, flat(model), losses_of(whole)), accumulated)


def trainer_fails_on_one(rank):
    from headroom.integrations.transformers import HeadroomCallback

    from helpers.trainers import trainer_of

    with as_by_torchrun(), shared_folder() as folder:
        callback = HeadroomCallback("1 GiB", sample_batch=[1, 2] if rank else None)
        trainer = trainer_of(language_model(), language_rows(), folder, [callback], **TRAINER)
        with pytest.raises(TypeError if rank else RankError, match="of the loader is list"):
            trainer.train()


def test_an_error_on_one_rank_ends_the_training_of_all(ranks):
    ranks(imports, "headroom.integrations.trainer_fit", "helpers.hf_models")
    ranks(trainer_fails_on_one)


# ---- accelerate ----------------------------------------------------------------------------------


def rows_of_steps():
    """The batches of the steps, each of ``ROWS`` samples."""
    rows = samples(STEPS * ROWS)
    steps = [rows[k : k + ROWS] for k in range(0, len(rows), ROWS)]
    return [{k: torch.stack([row[k] for row in step]).double() for k in step[0]} for step in steps]


def plain(steps):
    """Where the parameters begin and end in a plain loop with the whole batches of steps."""
    model = stack(dropout=0.0).double()
    began = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in (rows_of_steps()[step] for step in steps):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return began, flat(model)


def accelerate_of_two(rank, want, accumulated):
    import accelerate
    from headroom.integrations.accelerate import fit

    def own(batch):
        """The batches of this rank for one step."""
        mine = {name: x[rank::2] for name, x in batch.items()}
        size = ROWS // 2 // accumulated
        return [{k: x[at : at + size] for k, x in mine.items()} for at in range(0, ROWS // 2, size)]

    def made(budget):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        model = stack(dropout=0.0).double()
        found = fit(
            accelerator,
            model,
            own(rows_of_steps()[0])[0],
            budget=budget,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            tell=lambda text: None,
        )
        return accelerator, found

    def train(accelerator, found, model, optimizer, steps):
        for batch in itertools.chain.from_iterable(own(rows_of_steps()[k]) for k in steps):
            with accelerator.accumulate(model):
                loss = found.backward(model, batch)
                assert math.isfinite(loss) and not loss.requires_grad
                optimizer.step()
                optimizer.zero_grad()

    with as_by_torchrun(), shared_folder() as folder:
        _, free = made("1 GiB")
        most = min(gathered(lambda: free.fitted.before_peak))
        accelerator, found = made(int(0.9 * most))
        assert found.fitted.choice.micro_batches > accumulated or "L5" in found.fitted.choice.levels
        prepared = accelerator.prepare(found.model, found.optimizer)
        exchanges = exchanges_of(prepared[0])
        train(accelerator, found, *prepared, range(2))
        accelerator.save_state(folder)
        train(accelerator, found, *prepared, range(2, STEPS))
        assert len(exchanges) == STEPS
        assert_same_everywhere(found.fitted, found.model)
        assert_near(found.model, want, 1e-10)
        accelerator, again = made(int(0.9 * most))
        prepared = accelerator.prepare(again.model, again.optimizer)
        accelerator.load_state(folder)
        train(accelerator, again, *prepared, range(2, STEPS))
        assert_near(again.model, want, 1e-10)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_accelerate_on_two_ranks(ranks, accumulated):
    ranks(accelerate_of_two, plain(range(STEPS)), accumulated)


# ---- Lightning -----------------------------------------------------------------------------------


def lightning_of_two(rank, want, accumulated):
    import lightning
    from headroom.integrations.lightning import FitCallback, fit_optimizer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = stack(dropout=0.0).double()

        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return fit_optimizer(self, torch.optim.SGD(self.parameters(), lr=0.05))

    class Counts(lightning.Callback):
        def on_train_start(self, trainer, module):
            self.exchanges = exchanges_of(trainer.strategy.model)

    def run(folder, callback, epochs=2, resume=None):
        counts, module = Counts(), Module()
        trainer = lightning.Trainer(
            **QUIET,
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            use_distributed_sampler=False,  # which shuffles
            max_epochs=epochs,
            accumulate_grad_batches=accumulated,
            default_root_dir=folder,
            callbacks=[callback, counts],
        )
        own = samples(2 * ROWS)[rank::2]
        rows = [{k: x.double() for k, x in row.items()} for row in own]
        loader = DataLoader(rows, batch_size=ROWS // 2 // accumulated)
        trainer.fit(module, loader, ckpt_path=resume)
        return module, trainer, len(counts.exchanges)

    with as_by_torchrun(), shared_folder() as folder:
        free = FitCallback("1 GiB", tell=lambda text: None)
        run(folder, free, epochs=1)
        most = min(gathered(lambda: free.fitted.before_peak + free.extra))
        told = []
        callback = FitCallback(int(0.9 * most), tell=told.append)
        module, trainer, count = run(folder, callback)
        assert "L5" in callback.fitted.choice.levels
        assert trainer.world_size == 2 and count == STEPS
        assert len(told) == (0 if rank else 2)
        assert_same_everywhere(callback.fitted, module)
        assert_near(module, want, 1e-10)
        _, half, _ = run(folder, FitCallback(int(0.9 * most), tell=told.append), epochs=1)
        half.save_checkpoint(f"{folder}/half.ckpt")
        again = FitCallback(int(0.9 * most), tell=told.append)
        resumed, _, _ = run(folder, again, resume=f"{folder}/half.ckpt")
        assert_near(resumed, want, 1e-10)
        assert_same_bits(resumed.parameters(), module.parameters())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_on_two_ranks(ranks, accumulated):
    pytest.importorskip("lightning")
    ranks(imports, "headroom.integrations.lightning")
    ranks(lightning_of_two, plain([0, 1, 0, 1]), accumulated)  # two epochs
