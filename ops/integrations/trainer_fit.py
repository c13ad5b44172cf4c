"""``headroom.fit`` for the Trainer of transformers: by a callback, or a call before it trains."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..fitting import Fitted
from ..fitting.agree import together
from ..patching.losses import has_fused_loss
from .batches import moved, repeated, sample_batch
from .first_steps import FirstSteps
from .loops import batches_planned, extra_bytes, fit_in_loop, mixed_precision
from .transformers import fuse_loss, smoothed_loss

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        "headroom.integrations.transformers needs the package transformers"
    ) from error

__all__ = ["HeadroomCallback", "fit_trainer"]

WHO = "HeadroomCallback"
STATE = "trainer_state.json"
# The Trainer steps its optimizer itself, after it has taken the norm of all gradients.
IN_A_LOOP = {"release": (False,)}
# What can still be changed when the loader, the optimizer and its schedule are made.
LATE = {**IN_A_LOOP, "optimizer": ("given",), "weights": ("given",)}


class HeadroomCallback(TrainerCallback, ExportableState):
    """Fits the training of a Trainer into a budget of memory.

    Give it to the Trainer when that is made: ``Trainer(..., callbacks=[HeadroomCallback(budget=
    "6 GiB")])``. When ``train()`` is called, :func:`headroom.fit` plans a step with the Trainer's
    own loss, precision and accumulation on a batch of its loader. Then the model gets save levels
    and the loss without logits; ``per_device_train_batch_size`` is divided and
    ``gradient_accumulation_steps`` multiplied, so that a step has the same samples; and the
    optimizer is replaced before its schedule is made. Activation checkpointing of the Trainer is
    switched off: levels take its place.

    A Trainer tells its callbacks too little for that, so the callback finds the Trainer that makes
    it. Added to a Trainer that exists, it can only change levels and loss: use
    :func:`fit_trainer` then.

    Args:
        budget: bytes, or text such as "6 GiB"; None: the memory of the device.
        allow: what may change the mathematics: "8bit", "bf16", "adafactor".
        sample_batch: a batch as the loader yields it, where the first one is not among the
            longest. None: the first one.
        tell: is called with the table of what was chosen, and after three steps with what was
            measured, on the first rank.

    Attributes:
        fitted: what :func:`headroom.fit` found, from the beginning of the training on.
        measured: peak and time of the first steps.
        extra: bytes of the budget that the Trainer itself holds.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        allow: Sequence[str] = (),
        *,
        sample_batch: Any = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.budget, self.allow = budget, tuple(allow)
        self.sample_batch, self._tell = sample_batch, tell
        self.fitted: Fitted | None = None
        self.measured: FirstSteps | None = None
        self.choice: dict[str, Any] | None = None
        self.extra = 0
        self._batches = 1.0  # of a step, for each that was planned
        self._says = self._trains = False

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint of the Trainer keeps: the choice, which a resumed run takes."""
        return {
            "args": {"budget": self.budget, "allow": list(self.allow)},
            "attributes": {"choice": self.choice},
        }

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Is called by the Trainer when it has been made."""
        self.attach(_calling_trainer())

    def attach(self, trainer: Trainer) -> None:
        """Makes ``train()`` of a Trainer fit it first, unless that was done."""
        own = trainer.train

        @functools.wraps(own)
        def train(resume_from_checkpoint: Any = None, *others: Any, **options: Any) -> Any:
            if self.fitted is None:
                self.fit(trainer, resume_from_checkpoint)
            self._trains = True
            try:
                return own(resume_from_checkpoint, *others, **options)
            finally:
                self._trains = False
                if self.measured is not None:
                    self.measured.abandon()

        vars(trainer)["train"] = train

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Is called by the Trainer when everything is made and loaded."""
        trainer = _calling_trainer()
        if self.fitted is None:
            self.fit(trainer, late=True)
        assert self.fitted is not None
        # transformers looks for the state of every callback in a checkpoint that it resumed from.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.measured = FirstSteps(
            trainer.model,
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            args.device,
            self.fitted.predicted_peak + self.extra,
            self.fitted.predicted_seconds * self._batches,
            self.tell,
        )
        if self._trains:  # else nothing would end a recording after an error
            self.measured.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Is called by the Trainer after each optimizer step."""
        if self.measured is not None:
            self.measured.step_ended()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Is called by the Trainer at the end."""
        if self.measured is not None:
            self.measured.end()

    def fit(self, trainer: Trainer, resume_from_checkpoint: Any = None, late: bool = False) -> None:
        """Plans the training of a Trainer, and changes the Trainer for it."""
        _check(trainer)
        kept = _choice_of_checkpoint(trainer, resume_from_checkpoint) or self.choice
        fitted = self._fitted(trainer, kept, late)
        _change(trainer, fitted, late)
        self.fitted, self.choice = fitted, asdict(fitted.choice)
        self._says = trainer.is_world_process_zero()
        self.tell(str(fitted))

    def tell(self, text: str) -> None:
        """Tells on the first rank."""
        if self._says:
            self._tell(text)

    def _fitted(self, trainer: Any, kept: Mapping[str, Any] | None, late: bool) -> Fitted:
        args, device = trainer.args, torch.device(trainer.args.device)
        steps = args.gradient_accumulation_steps
        with together():  # so that all ranks hear of an error
            inputs = self._inputs(trainer)
            # The Trainer fetches all batches of a step, and on the CPU one of the next step.
            held = [inputs] * (steps + (device.type == "cpu"))
            self.extra = extra_bytes(trainer.model, *held)
            planned = repeated(inputs, batches_planned(steps))
            self._batches = steps / batches_planned(steps)
            only = _possible(trainer, kept, late)
            precision = mixed_precision(trainer.accelerator, who=WHO)
        trainer.model.train()  # as the Trainer does before each step
        with _without_checkpointing(trainer.model), _optimizer_of(trainer) as optimizer:
            return fit_in_loop(
                trainer.model,
                (planned, _items(trainer, planned)),
                budget=self.budget,
                extra=self.extra,
                who=WHO,
                only=only,
                optimizer=optimizer,
                forward=functools.partial(_forward, trainer),
                device=device,
                max_grad_norm=args.max_grad_norm or float("inf"),
                allow=self.allow,
                **precision,
            )

    def _inputs(self, trainer: Any) -> dict[str, Any]:
        batch = self.sample_batch
        if batch is None:
            batch = sample_batch(trainer.get_train_dataloader(), who=WHO)
        if not isinstance(batch, Mapping):
            raise TypeError(f"{WHO}: a batch is {type(batch).__name__}, wanted a dict")
        return moved(dict(batch), torch.device(trainer.args.device))


def fit_trainer(
    trainer: Trainer,
    budget: int | str | None = None,
    allow: Sequence[str] = (),
    *,
    sample_batch: Any = None,
    resume_from_checkpoint: str | bool | None = None,
    tell: Callable[[str], Any] = print,
) -> HeadroomCallback:
    """Fits the training of a Trainer into a budget of memory, before its ``train()`` is called.

    Does what :class:`HeadroomCallback` does, now, and returns that callback, which measures the
    first steps; ``.fitted`` is the plan.

    Args:
        trainer: whose ``train()`` was not called yet.
        budget, allow, sample_batch, tell: as in :class:`HeadroomCallback`.
        resume_from_checkpoint: what ``train()`` will be given. The choice of the run that wrote
            the checkpoint is taken again, so that its optimizer's state fits.
    """
    callback = HeadroomCallback(budget, allow, sample_batch=sample_batch, tell=tell)
    callback.fit(trainer, resume_from_checkpoint)
    callback.attach(trainer)
    trainer.add_callback(callback)
    return callback


def _calling_trainer() -> Any:
    """Returns the Trainer that is calling a callback, which it does not pass itself to."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    raise RuntimeError(
        f"{WHO} is called by something else than a Trainer of transformers; call "
        "headroom.integrations.transformers.fit_trainer(trainer, ...) before train()"
    )


def _check(trainer: Any) -> None:
    """Raises for a Trainer whose memory cannot be planned."""
    wrong = None
    if trainer.model_init is not None:
        wrong = "has a model_init, which makes another model in train(); give it a model"
    elif trainer.args.n_gpu > 1:
        wrong = "uses nn.DataParallel; start one process per GPU, or let one GPU be visible"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled:
        wrong = "shards the model, by DeepSpeed or FSDP, which is not planned here"
    elif trainer.args.auto_find_batch_size:
        wrong = "has auto_find_batch_size=True, which changes the batch as well; leave it out"
    if wrong is not None:
        raise ValueError(f"{WHO}: the Trainer {wrong}")


def _possible(trainer: Any, kept: Mapping[str, Any] | None, late: bool) -> dict[str, Any]:
    """Returns the values that the fields of a choice may have."""
    steps = batches_planned(trainer.args.gradient_accumulation_steps)
    size = trainer.args.per_device_train_batch_size
    if kept is not None:
        only = {name: (value,) for name, value in kept.items() if name != "levels"}
    elif late:
        only = {**LATE, "micro_batches": (steps,)}
    else:
        only = {
            **IN_A_LOOP,
            "micro_batches": tuple(steps * n for n in range(1, size + 1) if size % n == 0),
        }
        if trainer.optimizer is not None and trainer.lr_scheduler is not None:
            only |= {"optimizer": ("given",), "weights": ("given",)}  # the schedule is made
    if not _loss_can_be_fused(trainer):
        only["fused_loss"] = (has_fused_loss(trainer.model),)
    return only


def _loss_can_be_fused(trainer: Any) -> bool:
    """Whether nothing of the user's looks at logits while the model trains."""
    own = type(trainer).compute_loss is Trainer.compute_loss and "compute_loss" not in vars(trainer)
    return own and trainer.compute_loss_func is None


def _forward(trainer: Any, model: nn.Module, batch: tuple[dict[str, Any], Any]) -> Tensor:
    inputs, items = batch
    compute = trainer.compute_loss
    if has_fused_loss(model) and _loss_can_be_fused(trainer):
        compute = functools.partial(smoothed_loss, trainer, compute)  # as fuse_loss() will do
    return compute(model, dict(inputs), num_items_in_batch=items)


def _items(trainer: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """The number of labels that the Trainer divides a sum of losses by, if it does."""
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not counts or not isinstance(inputs.get("labels"), Tensor):
        return None
    return inputs["labels"].ne(-100).sum()


@contextmanager
def _optimizer_of(trainer: Any) -> Iterator[torch.optim.Optimizer]:
    """Gives the optimizer that the Trainer will make or has, and leaves the Trainer as it was."""
    before = trainer.optimizer
    try:
        trainer.create_optimizer()
        yield getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    finally:
        trainer.optimizer = before


@contextmanager
def _without_checkpointing(model: Any) -> Iterator[None]:
    """Switches off activation checkpointing of transformers: levels take its place."""
    parts = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for part in parts:
        part.gradient_checkpointing = False
    try:
        yield
    except BaseException:
        for part in parts:
            part.gradient_checkpointing = True
        raise


def _change(trainer: Any, fitted: Fitted, late: bool) -> None:
    args, choice = trainer.args, fitted.choice
    args.activation_checkpointing = args.gradient_checkpointing = False
    if late:
        return
    if choice.optimizer != "given" or choice.weights != "given":
        trainer.optimizer = fitted.optimizer
    parts = choice.micro_batches // batches_planned(args.gradient_accumulation_steps)
    args.per_device_train_batch_size //= parts
    args.gradient_accumulation_steps *= parts
    trainer._train_batch_size = args.train_batch_size  # which the Trainer has read already
    if choice.fused_loss and trainer.label_smoother is not None:
        fuse_loss(trainer)


def _choice_of_checkpoint(trainer: Any, resume: Any) -> dict[str, Any] | None:
    """Returns the choice of the run that wrote the checkpoint to resume from."""
    if not resume:
        return None
    folder = get_last_checkpoint(trainer.args.output_dir) if resume is True else resume
    path = os.path.join(folder or "", STATE)
    if not os.path.isfile(path):
        return None  # the Trainer says so
    with open(path) as file:
        kept = json.load(file).get("stateful_callbacks") or {}
    found = kept.get(HeadroomCallback.__name__) or {}
    return found.get("attributes", {}).get("choice")
