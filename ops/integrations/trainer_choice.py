"""Says what ``headroom.fit`` can choose for a Trainer of transformers, and applies a choice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from ..fitting import Fitted
from ..patching.losses import has_fused_loss
from ..step.micro_batches import bytes_of, samples_of
from ..step.packed import chosen, ends_of
from ..step.pytree import map_tensors
from .loops import OPTIMIZER_STAYS, batches_planned, optimizer_of_choice, weights_of_choice
from .trainer_loss import fuse_loss
from .trainer_step import batch_of_loader, loss_can_be_fused

__all__ = ["apply", "check", "choice_of_checkpoint", "possible", "smaller_rows"]

STATE = "trainer_state.json"
# The Trainer steps its optimizer itself, after it has taken the norm of all gradients.
IN_A_LOOP = {"release": (False,)}


def check(trainer: Any, *, who: str) -> None:
    """Raises for a Trainer whose memory cannot be planned."""
    args = trainer.args
    wrong = None
    if trainer.model_init is not None:
        wrong = "has a model_init, which makes another model in train(); give it a model"
    elif args.n_gpu > 1:
        wrong = "uses nn.DataParallel; start one process per GPU, or let one GPU be visible"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled:
        wrong = "shards the model, by DeepSpeed or FSDP, which is not planned here"
    elif args.auto_find_batch_size:
        wrong = "has auto_find_batch_size=True, which changes the batch as well; leave it out"
    elif getattr(args, "use_liger_kernel", False):
        wrong = "has use_liger_kernel=True, which changes the model later; leave it out"
    if wrong is not None:
        raise ValueError(f"{who}: the Trainer {wrong}")


def possible(
    trainer: Any, kept: Mapping[str, Any] | None, *, late: bool, adds_up: bool, who: str
) -> dict[str, Any]:
    """Returns the values that the fields of a choice may have.

    Args:
        kept: the choice of the run that is resumed, whose optimizer's state has to fit.
        late: loader, optimizer and schedule are made already.
        adds_up: whether losses of smaller batches add up to those of the Trainer's.
    """
    steps = batches_planned(trainer.args.gradient_accumulation_steps)
    cuts = [1] if late or not adds_up else cuts_of(trainer, who=who)
    only: dict[str, Any] = {**IN_A_LOOP, "micro_batches": tuple(steps * n for n in cuts)}
    if late or (trainer.optimizer is not None and trainer.lr_scheduler is not None):
        only |= OPTIMIZER_STAYS  # the schedule is made
    elif kept is not None:
        only |= optimizer_of_choice(kept)
    if kept is not None:
        if kept["micro_batches"] in only["micro_batches"]:
            only["micro_batches"] = (kept["micro_batches"],)
        only["fused_loss"] = (kept["fused_loss"],)
        only |= weights_of_choice(kept, trainer.model)
    if not loss_can_be_fused(trainer):
        only["fused_loss"] = (has_fused_loss(trainer.model),)
    return only


def cuts_of(trainer: Any, *, who: str) -> list[int]:
    """Returns into how many parts a batch of the loader can be cut, so that each step of the
    training has the same samples."""
    args = trainer.args
    size, ranks = args.per_device_train_batch_size, max(1, args.world_size)
    found = [n for n in range(1, size + 1) if size % n == 0]
    if trainer.accelerator.split_batches:  # the loader's batch is for all ranks
        found = [n for n in found if (size // n) % ranks == 0] or [1]
    if args.dataloader_drop_last and hasattr(trainer.train_dataset, "__len__"):
        samples = len(trainer.train_dataset) // ranks  # smaller batches leave out fewer of them
        found = [n for n in found if samples // (size // n) == n * (samples // size)]
    own = type(trainer).get_train_dataloader is not Trainer.get_train_dataloader
    if len(found) > 1 and (own or "get_train_dataloader" in vars(trainer)):
        found = found if _loader_follows(trainer, found[-1], who=who) else [1]
    return found


def _loader_follows(trainer: Any, parts: int, *, who: str) -> bool:
    """Returns whether a loader of the user's own has smaller batches where the Trainer's are."""
    found = []
    for count in (1, parts):
        with _divided(trainer, count):
            batch = batch_of_loader(trainer, who=who)
        if not isinstance(batch, Mapping):  # of which the Trainer makes batches of its own size
            return False
        found.append(samples_of(batch) or 0)
    return found[0] == parts * found[1]


@contextmanager
def _divided(trainer: Any, count: int) -> Iterator[None]:
    """Lets a Trainer make loaders of batches of a part of their size while it lasts."""
    args, before = trainer.args, trainer._train_batch_size
    size = args.per_device_train_batch_size
    args.per_device_train_batch_size = trainer._train_batch_size = size // count
    try:
        yield
    finally:
        args.per_device_train_batch_size, trainer._train_batch_size = size, before


def smaller_rows(
    trainer: Any, batch: Any, counts: Iterable[int], *, is_given: bool, who: str
) -> dict[int, Any]:
    """Returns the largest batches that the loader yields where the size of its batches is divided
    by each of ``counts``, if it packs its samples into one row: parts of that row would have even
    numbers of tokens, and its own smaller rows have even numbers of samples.

    Args:
        batch: of the loader.
        is_given: whether it is the user's, who knows it to be the largest: its own samples are
            divided then, if each is one sequence.
    """
    ends = ends_of(batch)
    if ends is None:
        return {}
    found = {}
    for count in counts:
        if count == 1:
            continue
        if not is_given:
            with _divided(trainer, count):
                found[count] = batch_of_loader(trainer, who=who)
        elif len(ends) - 1 == trainer.args.per_device_train_batch_size:
            size = (len(ends) - 1) // count
            rows = (chosen(batch, ends, [*range(k * size, (k + 1) * size)]) for k in range(count))
            found[count] = map_tensors(
                max(rows, key=bytes_of), torch.clone
            )  # as large as it is alone
    return found


def apply(trainer: Any, fitted: Fitted, *, late: bool) -> None:
    """Changes a Trainer for what was chosen."""
    args, choice = trainer.args, fitted.choice
    args.activation_checkpointing = args.gradient_checkpointing = False
    if late:
        return
    if choice.optimizer != "given" or choice.weights != "given" or choice.offload:
        trainer.optimizer = fitted.optimizer
    parts = choice.micro_batches // batches_planned(args.gradient_accumulation_steps)
    args.per_device_train_batch_size //= parts
    args.gradient_accumulation_steps *= parts
    trainer._train_batch_size = args.train_batch_size  # which the Trainer has read already
    if choice.fused_loss and trainer.label_smoother is not None:
        fuse_loss(trainer)


def choice_of_checkpoint(
    trainer: Any, resume: Any
) -> tuple[dict[str, Any], tuple[Any, Any]] | None:
    """Returns the choice of the run that wrote the checkpoint to resume from, and its budgets, of
    the device and of the host."""
    if not resume:
        return None
    folder = get_last_checkpoint(trainer.args.output_dir) if resume is True else resume
    if folder is None or not os.path.isfile(os.path.join(folder, STATE)):
        return None  # the Trainer says so
    with open(os.path.join(folder, STATE)) as file:
        kept = (json.load(file).get("stateful_callbacks") or {}).get("HeadroomCallback") or {}
    # transformers keeps the states of several callbacks of one class as a list.
    for state in kept if isinstance(kept, list) else [kept]:
        choice = state.get("attributes", {}).get("choice")
        if choice is not None:
            args = state.get("args", {})
            return choice, (args.get("budget"), args.get("host_budget"))
    return None
