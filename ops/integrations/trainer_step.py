"""A step of the Trainer of transformers, as ``headroom.fit`` plans and measures it."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import Trainer

from .._core.randomness import generators_kept
from ..patching.losses import has_fused_loss
from ..planning.trace import NOT_EVALUATED
from ..step.errors import PlanError
from ..step.micro_batches import SAMPLES, SUM, bytes_of
from .batches import moved, sample_batch
from .trainer_loss import smoothed_loss
from .values import ValuesRead

__all__ = [
    "Batch",
    "TrainerLoss",
    "batch_of_loader",
    "evaluated",
    "inputs_of",
    "loss_can_be_fused",
    "optimizer_of",
    "rule_of_trainer",
    "step_of",
    "without_checkpointing",
]

# Attributes of a Trainer that no loss is computed from.
SHARED = (
    "_headroom_callback",
    "callback_handler",
    "data_collator",
    "eval_dataset",
    "train_dataset",
)

KEEPS_LOGITS = (
    "evaluation is counted with the logits of one batch, but for compute_metrics the Trainer keeps "
    "those of all batches on the device: eval_accumulation_steps=1 brings them to the host"
)

Batch = tuple[dict[str, Any], Any]  # the inputs, and the number of items that losses are divided by


def inputs_of(trainer: Any, batch: Any, *, who: str) -> dict[str, Any]:
    """Returns a batch of the loader on the Trainer's device.

    Raises:
        TypeError: it is no dict.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"{who}: a batch of the loader is {type(batch).__name__}, wanted a dict of what "
            f"compute_loss() is given; where {type(trainer).__name__} makes that in its step, as "
            "GRPO does, give such a dict as sample_batch=, or leave the callback out and call "
            "headroom.patch(model, 'L5')"
        )
    return moved(dict(batch), torch.device(trainer.args.device))


def batch_of_loader(trainer: Any, *, who: str) -> Any:
    """Returns a batch of the Trainer's loader; making that leaves random numbers as they were."""
    with generators_kept():
        return sample_batch(trainer.get_train_dataloader(), who=who)


def step_of(trainer: Any, inputs: dict[str, Any]) -> Batch:
    """Returns inputs with the number of labels that the Trainer divides a sum of losses by."""
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not counts or not isinstance(inputs.get("labels"), Tensor):
        return inputs, None
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs["labels"]
        if getattr(trainer, "_loss_shifts_labels", False):  # nothing predicts the first of a row
            labels = labels[..., 1:]
    return inputs, labels.ne(-100).sum()


def rule_of_trainer(trainer: Any, batch: Batch) -> str:
    """Returns how the Trainer makes one loss of those of the batches that it accumulates."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        counts = trainer.model_accepts_loss_kwargs and batch[1] is not None
        scaled = counts or trainer.compute_loss_func is not None
    return SUM if scaled else SAMPLES


def evaluated(trainer: Any, *, who: str) -> tuple[Any, list[str]]:
    """Returns the largest batch of the Trainer's evaluation, on the CPU, or None if there is none,
    and what a report says of what is not planned of it."""
    args, data = trainer.args, trainer.eval_dataset
    if data is None or not (args.do_eval or args.eval_on_start):
        return None, []
    if getattr(args, "predict_with_generate", False):
        return None, [f"{NOT_EVALUATED}: it generates, so that its bytes grow with the answers"]
    try:
        with generators_kept():
            names = [*data] if isinstance(data, dict) else [None]
            found = [sample_batch(trainer.get_eval_dataloader(name), who=who) for name in names]
    except Exception as error:  # training shall not fail for it
        return None, [f"{NOT_EVALUATED}: {error}"]
    keeps = trainer.compute_metrics is not None and not args.prediction_loss_only
    if keeps and not args.eval_accumulation_steps and not args.batch_eval_metrics:
        return max(found, key=bytes_of), [KEEPS_LOGITS]
    return max(found, key=bytes_of), []


def loss_can_be_fused(trainer: Any) -> bool:
    """Returns whether nothing of the user's looks at logits while the model trains."""
    own = type(trainer).compute_loss is Trainer.compute_loss and "compute_loss" not in vars(trainer)
    return own and trainer.compute_loss_func is None


class TrainerLoss:
    """Computes losses as a Trainer does, on a copy of it, so that it logs nothing and its own
    attributes stay.

    A deep copy, with which a step is planned, shares what the loss does not need: callbacks, which
    may hold files and modules of Python, and the data, which may be large. It shares what cannot be
    copied, too.
    """

    def __init__(self, trainer: Any) -> None:
        self._own, self._trainer = trainer, copy.copy(trainer)
        self.values = ValuesRead()
        for name, value in vars(trainer).items():
            if _is_plain(value):  # such as metrics, which a loss may add to
                vars(self._trainer)[name] = copy.deepcopy(value)
        # train() sets it, and losses of TRL divide by it.
        vars(self._trainer).setdefault(
            "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps
        )
        handler = copy.copy(trainer.callback_handler)
        handler.callbacks = []
        vars(self._trainer).update(
            callback_handler=handler, state=copy.copy(trainer.state), log=_ignored
        )

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss of a batch."""
        inputs, items = batch
        with self.values.answered():
            return self._compute(model)(model, dict(inputs), num_items_in_batch=items)

    def _compute(self, model: nn.Module) -> Any:
        trainer = self._trainer
        compute = trainer.compute_loss
        if has_fused_loss(model) and loss_can_be_fused(trainer):
            return functools.partial(smoothed_loss, trainer, compute)  # as fuse_loss() will do
        return compute

    def evaluate(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Runs a step of the Trainer's evaluation, whose logits are kept where metrics are computed
        from them."""
        trainer = self._trainer
        only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        fused = mock.patch.dict(vars(trainer), compute_loss=self._compute(model))
        with self.values.answered(), fused:
            trainer.prediction_step(model, dict(inputs), only)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerLoss:
        made, before = copy.copy(self), self._trainer
        made._trainer = trainer = copy.copy(before)
        for old in (self, self._own, before):  # which functions of the user's may hold
            memo[id(old)] = made if old is self else trainer
        for name in SHARED:
            value = vars(before).get(name)
            if value is not None:
                memo[id(value)] = value
        for name, value in vars(before).items():
            within = dict(memo)  # so that an error leaves nothing half copied
            try:
                vars(trainer)[name] = copy.deepcopy(value, within)
            except PlanError:
                raise
            except Exception:  # such as a file, which nothing can copy
                continue
            alive = within.pop(id(within), [])  # as deepcopy() keeps what it has met
            memo.update(within)
            memo.setdefault(id(memo), []).extend(alive)
        return made


def _is_plain(value: Any) -> bool:
    """Returns whether a value is numbers and text, and lists and dicts of these."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, str, type(None)))


def _ignored(*args: Any, **options: Any) -> None:
    """Logs nothing."""


@contextmanager
def optimizer_of(trainer: Any) -> Iterator[torch.optim.Optimizer]:
    """Gives the optimizer that the Trainer will make or has, and leaves the Trainer as it was."""
    before = trainer.optimizer
    try:
        trainer.create_optimizer()
        yield getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    finally:
        trainer.optimizer = before


@contextmanager
def without_checkpointing(model: Any) -> Iterator[None]:
    """Switches off activation checkpointing of transformers: levels take its place. Switches it on
    again after an error."""
    parts = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for part in parts:
        part.gradient_checkpointing = False
    try:
        yield
    except BaseException:
        for part in parts:
            part.gradient_checkpointing = True
        raise
