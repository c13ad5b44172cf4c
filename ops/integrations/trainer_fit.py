"""``headroom.fit`` for the Trainer of transformers: by a callback, or a call before it trains."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..fitting import Fitted
from ..fitting.ranks import gathered, together
from ..step.description import Step
from ..step.micro_batches import largest_part, repeated
from ..step.restoring import ModelBefore
from .loops import (
    WHOLE_BATCHES,
    FitsLoop,
    batches_planned,
    extra_bytes,
    fit_in_loop,
    kept_or_found,
    mixed_precision,
    rule_of_parts,
    with_kept,
)

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "headroom.integrations.transformers needs the package transformers"
    ) from error

from .trainer_choice import apply, check, choice_of_checkpoint, possible, smaller_rows
from .trainer_step import (
    TrainerLoss,
    batch_of_loader,
    evaluated,
    inputs_of,
    optimizer_of,
    rule_of_trainer,
    step_of,
    without_checkpointing,
)

__all__ = ["HeadroomCallback", "fit_trainer"]

WHO = "HeadroomCallback"
# Attributes of a Trainer: the callback that its train() calls, and what was found for it.
ATTACHED, FITTED = "_headroom_callback", "_headroom_fitted"


class HeadroomCallback(FitsLoop, TrainerCallback, ExportableState):
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

    Arguments and attributes are those of :class:`headroom.integrations.loops.FitsLoop`.
    """

    _trains = False
    _step: Step | None = None  # of the Trainer, without its batch
    # What was planned, as the loader yielded it, until the warm-up: its batch, and the rows that it
    # will yield instead, by the parts that batches are divided into.
    _batch: Any = None
    _rows: Mapping[int, Any] = {}
    _parts = 1  # that batches of the loader were divided into

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint of the Trainer keeps: the choice, which a resumed run takes."""
        return {
            "args": {
                "budget": self.budget,
                "allow": list(self.allow),
                "host_budget": self.host_budget,
            },
            "attributes": {"choice": self.choice},
        }

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attaches to the Trainer that has been made."""
        self.attach(_calling_trainer())

    def attach(self, trainer: Trainer) -> None:
        """Makes ``train()`` of a Trainer fit it first, unless that was done."""
        own = trainer.train

        @functools.wraps(own)
        def train(resume_from_checkpoint: Any = None, *others: Any, **options: Any) -> Any:
            self._fit_once(trainer, resume_from_checkpoint)
            self._trains = True
            try:
                return own(resume_from_checkpoint, *others, **options)
            finally:
                self._trains = False
                if self.measured is not None:
                    self.measured.abandon()

        vars(trainer)["train"] = train
        vars(trainer)[ATTACHED] = self

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Fits the model, if nothing has; the Trainer has made and loaded everything."""
        trainer = _calling_trainer()
        attached = vars(trainer).get(ATTACHED)
        if attached is not None and attached is not self:
            # restore_callback_states_from_checkpoint=True has made another one of a checkpoint.
            self.__dict__ = attached.__dict__
        self._fit_once(trainer, late=True)
        self._warm_up(trainer)
        # transformers looks for the state of every callback in a checkpoint that it resumed from.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        # Without train() of attach() nothing would end a recording after an error.
        self._measure(trainer.model, optimizer, args.device, records=self._trains)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begins to measure a step."""
        if self.measured is not None:
            self.measured.step_began()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Ends the measurement of a step."""
        if self.measured is None:
            return
        self.measured.step_ended()
        if control.should_evaluate or control.should_save:
            self.measured.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Tells what was measured."""
        if self.measured is not None:
            self.measured.end()

    def _warm_up(self, trainer: Trainer) -> None:
        """Runs the forward and backward pass of the largest batch, of which nothing stays: what
        does not fit fails before the first step, and later ones find room of that size."""
        if self._batch is None:
            return
        assert self._step is not None
        row = self._rows.get(self._parts)
        given = largest_part(self._batch, self._parts) if row is None else row
        self._batch, self._rows = None, {}
        model, before = self._step.model, ModelBefore(self._step.model)
        with before:
            before.keep(model.parameters())
            inputs = step_of(trainer, inputs_of(trainer, given, who=WHO))
            try:
                model.train()  # as the Trainer does before each step
                self._step.loss_of(model, inputs).backward()
            finally:
                before.restore()

    def _fit_once(self, trainer: Trainer, *given: Any, **options: Any) -> None:
        if self.fitted is None:
            self.fit(trainer, *given, **options)
        elif vars(trainer).get(FITTED) is not self.fitted:
            raise RuntimeError(
                f"{WHO}: it has fitted the training of another Trainer; give each Trainer a "
                f"{WHO} of its own"
            )

    def fit(self, trainer: Trainer, resume_from_checkpoint: Any = None, late: bool = False) -> None:
        """Plans the training of a Trainer, and changes the Trainer for it."""
        check(trainer, who=WHO)
        if vars(trainer).get(FITTED) is not None:
            raise RuntimeError(
                f"{WHO}: the Trainer's training is fitted already; give it one {WHO}, or call "
                "fit_trainer once"
            )
        # Of whichever rank sees the checkpoint.
        found = gathered(lambda: choice_of_checkpoint(trainer, resume_from_checkpoint))
        own = self.choice, (self.budget, self.host_budget)
        kept, budgets = next((one for one in found if one is not None), own)
        fitted = self._fitted(trainer, kept, self._again(kept, *budgets), late)
        steps = batches_planned(trainer.args.gradient_accumulation_steps)
        self._parts = fitted.choice.micro_batches // steps
        apply(trainer, fitted, late=late)
        self.fitted, self.choice = fitted, fitted.choice.to_json()
        vars(trainer)[FITTED] = fitted
        self._says = trainer.is_world_process_zero()
        self.tell(str(fitted))

    def _fitted(
        self,
        trainer: Any,
        kept: Mapping[str, Any] | None,
        again: Mapping[str, Any] | None,
        late: bool,
    ) -> Fitted:
        args, device = trainer.args, torch.device(trainer.args.device)
        steps = batches_planned(args.gradient_accumulation_steps)
        with together():  # so that all ranks hear of an error
            given = self.sample_batch
            self._batch = batch_of_loader(trainer, who=WHO) if given is None else given
            inputs = inputs_of(trainer, self._batch, who=WHO)
            # The Trainer fetches all batches of a step, and on the CPU one of the next step.
            held = [inputs] * (args.gradient_accumulation_steps + (device.type == "cpu"))
            self.extra = extra_bytes(trainer.model, *held)
            self._batches = args.gradient_accumulation_steps / steps
            batch = step_of(trainer, repeated(inputs, steps))
            precision = mixed_precision(trainer.accelerator, who=WHO)
            eval_batch, eval_notes = evaluated(trainer, who=WHO)
        forward = TrainerLoss(trainer)
        step = Step(
            trainer.model,
            None,
            batch,
            forward=forward,
            device=device,
            max_grad_norm=args.max_grad_norm or float("inf"),
            evaluates=None if eval_batch is None else forward.evaluate,
            evaluated=eval_batch,
            **precision,
        )
        self._step = step.but(batch=None)  # which is on the device

        def part_of(count: int) -> Any:
            row = self._rows.get(count // steps)
            if row is None:
                return largest_part(batch, count)
            return inputs_of(trainer, row, who=WHO), batch[1]

        def fitted(choice: Mapping[str, Any] | None) -> Fitted:
            with together():
                # The run that made a choice has looked whether the losses of its batches add up.
                adds_up = late or choice is not None
                if not adds_up:
                    rules = (rule_of_trainer(trainer, batch),)
                    adds_up = rule_of_parts(step, rules, steps) is not None
                only = possible(trainer, kept, late=late, adds_up=adds_up, who=WHO)
                cuts = [n // steps for n in only["micro_batches"]]
                self._rows = smaller_rows(
                    trainer, self._batch, cuts, is_given=given is not None, who=WHO
                )
            found = fit_in_loop(
                step.but(optimizer=optimizer, part_of=part_of if self._rows else None),
                budget=self.budget,
                host_budget=self.host_budget,
                extra=self.extra,
                who=WHO,
                only=only,
                allow=with_kept(self.allow, kept),
                choice=choice,
            )
            if not adds_up:
                found.notes.append(WHOLE_BATCHES)
            found.notes += [*eval_notes, *forward.values.note()]
            return found

        trainer.model.train()  # as the Trainer does before each step
        with without_checkpointing(trainer.model), optimizer_of(trainer) as optimizer:
            return kept_or_found(again, fitted)


def fit_trainer(
    trainer: Trainer,
    budget: int | str | None = None,
    allow: Sequence[str] = (),
    *,
    host_budget: int | str | None = None,
    sample_batch: Any = None,
    resume_from_checkpoint: str | bool | None = None,
    tell: Callable[[str], Any] = print,
) -> HeadroomCallback:
    """Fits the training of a Trainer into a budget of memory, before its ``train()`` is called.

    Does what :class:`HeadroomCallback` does, now, and returns that callback, which measures the
    first steps; ``.fitted`` is the plan.

    Args:
        trainer: whose ``train()`` was not called yet.
        budget, allow, host_budget, sample_batch, tell: as in :class:`HeadroomCallback`.
        resume_from_checkpoint: what ``train()`` will be given. The choice of the run that wrote
            the checkpoint is taken again, so that its optimizer's state fits.
    """
    callback = HeadroomCallback(
        budget, allow, host_budget=host_budget, sample_batch=sample_batch, tell=tell
    )
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
