"""Trainers of transformers that are quiet, and what they have logged."""

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from headroom.integrations import trainer_fit  # noqa: E402

QUIET = dict(
    max_steps=4,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    max_grad_norm=0.5,
    warmup_steps=2,
    learning_rate=1e-2,
)
OF_THE_TRAINER = (
    "optimizers",
    "optimizer_cls_and_kwargs",
    "compute_loss_func",
    "eval_dataset",
    "data_collator",
)


def trainer_of(model, data, folder, callbacks=(), cls=transformers.Trainer, **options):
    """A Trainer with some of its own options and of its arguments."""
    transformers.utils.logging.set_verbosity_error()
    own = {name: options.pop(name) for name in OF_THE_TRAINER if name in options}
    return cls(
        model,
        transformers.TrainingArguments(str(folder), **QUIET | options),
        train_dataset=data,
        callbacks=list(callbacks),
        **own,
    )


def trained(model, data, folder, callbacks=(), **options):
    trainer = trainer_of(model, data, folder, callbacks, **options)
    trainer.train()
    return trainer


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def rates_of(trainer):
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def forced(cuts=4, budget="1 GiB", tell=lambda text: None):
    """A callback that cuts batches into so many parts, however much memory there is."""

    class Forced(trainer_fit.HeadroomCallback):
        def fit(self, trainer, *given, **options):
            before = trainer_fit.possible
            steps = trainer_fit.batches_planned(trainer.args.gradient_accumulation_steps)

            def possible(*args, **kwargs):
                only = before(*args, **kwargs)
                wanted = [n for n in only["micro_batches"] if n == cuts * steps]
                return only | {"micro_batches": tuple(wanted or only["micro_batches"][:1])}

            trainer_fit.possible = possible
            try:
                super().fit(trainer, *given, **options)
            finally:
                trainer_fit.possible = before

    Forced.__name__ = "HeadroomCallback"  # as in a checkpoint
    return Forced(budget, tell=tell)
