"""``headroom.fit`` for the Trainer of Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .._core.randomness import generators_kept
from ..fitting import Fitted
from ..fitting.ranks import together
from ..planning.trace import NOT_EVALUATED
from ..step.description import Step
from ..step.micro_batches import bytes_of, repeated
from .batches import sample_batch
from .loops import (
    OPTIMIZER_STAYS,
    FitsLoop,
    batches_planned,
    extra_bytes,
    fit_in_loop,
    kept_or_found,
    optimizer_of_choice,
    weights_of_choice,
    with_kept,
)
from .values import ValuesRead

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError("headroom.integrations.lightning needs the package lightning") from error

__all__ = ["EnvironmentFit", "FitCallback", "fit_optimizer"]

WHO = "FitCallback"


class FitCallback(FitsLoop, Callback):
    """Fits the training of a Lightning Trainer into a budget of memory: by the save levels of the
    model's blocks, on request by its loss, and by the optimizer where :func:`fit_optimizer` is
    called.

    When the training starts, :func:`headroom.fit` plans a step with the module's own
    ``training_step``, precision, accumulation and optimizer on a batch of the loader. Batches stay
    as they are, because the loader is the module's own: where the budget asks for smaller ones,
    give the loader a smaller ``batch_size`` and the Trainer more ``accumulate_grad_batches``, which
    are planned.

    A checkpoint keeps the choice. A run that resumes within the same budget takes it again, and
    measures nothing; within another budget it takes the same optimizer.

    Arguments and attributes are those of :class:`headroom.integrations.loops.FitsLoop`; and

    Args:
        fused_loss: whether models of transformers may compute their loss without logits;
            ``training_step`` must then not look at logits.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        allow: Sequence[str] = (),
        *,
        host_budget: int | str | None = None,
        fused_loss: bool = False,
        sample_batch: Any = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        super().__init__(
            budget, allow, host_budget=host_budget, sample_batch=sample_batch, tell=tell
        )
        self.fused_loss = fused_loss
        self._step = 0
        self._kept_budgets = budget, host_budget  # of the choice of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "choice": self.choice,
            "budget": self.budget,
            "host_budget": self.host_budget,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what a checkpoint has kept."""
        self.choice = state_dict["choice"]
        self._kept_budgets = state_dict.get("budget"), state_dict.get("host_budget")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fits the model, if nothing has; the Trainer has made and loaded everything."""
        callbacks: list[Any] = getattr(trainer, "callbacks", [])
        others = [each for each in callbacks if isinstance(each, FitCallback) and each is not self]
        for each in others:
            if self.fitted is None and each.fitted is not None:
                # The program has one, and the environment asks for one: they are the same.
                self.__dict__ = each.__dict__
        if self.fitted is None:
            _check(trainer, pl_module, len(trainer.optimizers))
            self.fit(trainer, pl_module, trainer.optimizers[0], late=True)
        elif self.fitted.model is not pl_module:
            raise RuntimeError(
                f"{WHO}: it has fitted the training of another module; give each Trainer a {WHO} "
                "of its own"
            )
        self._measure(pl_module, trainer.optimizers[0], pl_module.device)
        self._step = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *given: Any, **options: Any
    ) -> None:
        """Begins to measure a step."""
        if self.measured is not None:
            self.measured.step_began()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *given: Any, **options: Any
    ) -> None:
        """Ends the measurement if this batch has ended a step."""
        if self.measured is not None and trainer.global_step > self._step:
            self._step = trainer.global_step
            self.measured.step_ended()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the evaluation that begins out of what is measured."""
        if self.measured is not None:
            self.measured.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells what was measured."""
        if self.measured is not None:
            self.measured.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stops to measure, after an error."""
        if self.measured is not None:
            self.measured.abandon()

    def fit(
        self, trainer: Trainer, module: LightningModule, optimizer: Any, *, late: bool = False
    ) -> Fitted:
        """Plans a training, and changes its module.

        Args:
            optimizer: of the module.
            late: a schedule is made of it already.
        """
        self.fitted = self._fitted(trainer, module, optimizer, late)
        self.choice = self.fitted.choice.to_json()
        self._says = trainer.is_global_zero
        self.tell(str(self.fitted))
        return self.fitted

    def _fitted(
        self, trainer: Trainer, module: LightningModule, optimizer: Any, late: bool
    ) -> Fitted:
        with together():  # so that all ranks hear of an error
            batch = self.sample_batch
            if batch is None:
                batch = sample_batch(trainer.train_dataloader, who=WHO)
            with generators_kept():
                batch = trainer.strategy.batch_to_device(batch)
            most = _accumulated(trainer)
            steps = batches_planned(most)
            self._batches = most / steps
            self.extra = extra_bytes(module, batch)
            eval_batch, eval_notes = _evaluated(trainer)
        values = ValuesRead()
        only: dict[str, Any] = {
            "release": (False,),
            "micro_batches": (steps,),
            "fused_loss": (False, True) if self.fused_loss else (False,),
        }
        if late:
            only |= OPTIMIZER_STAYS
        elif self.choice is not None:
            only |= optimizer_of_choice(self.choice) | weights_of_choice(self.choice, module)
        elif isinstance(trainer.strategy, DDPStrategy):
            only["weights"] = ("given",)  # its buckets have the dtype of the weights already

        def fitted(choice: Mapping[str, Any] | None) -> Fitted:
            step = Step(
                module,
                optimizer,
                repeated(batch, steps),
                forward=partial(_forward, trainer, values),
                evaluates=None if eval_batch is None else partial(_evaluate, trainer, values),
                evaluated=eval_batch,
                device=module.device,
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                max_grad_norm=trainer.gradient_clip_val or None,
            )
            return fit_in_loop(
                step,
                budget=self.budget,
                host_budget=self.host_budget,
                extra=self.extra,
                who=WHO,
                only=only,
                allow=with_kept(self.allow, None if late else self.choice),
                choice=choice,
            )

        found = kept_or_found(self._again(self.choice, *self._kept_budgets), fitted)
        found.notes += [*eval_notes, *values.note()]
        return found


class EnvironmentFit(FitCallback):
    """Fits as a FitCallback that the program has, or as one with these budgets: the environment
    asked for it. It is another class because a Trainer refuses two of one that keep something."""


def fit_optimizer(module: LightningModule, optimizer: Any) -> Any:
    """Returns the optimizer that the :class:`FitCallback` of a module's Trainer takes in the place
    of one; that one, if the Trainer has no such callback.

    Call it in ``configure_optimizers``, before a schedule is made::

        def configure_optimizers(self):
            optimizer = fit_optimizer(self, torch.optim.AdamW(self.parameters(), lr=1e-3))
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    The module is fitted then, on a batch of its loader, which this call makes where it is not made
    yet, as ``trainer.estimated_stepping_batches`` does. Give the callback a ``sample_batch`` if
    that is too early.

    Args:
        module: in its ``configure_optimizers``.
        optimizer: of its parameters, the only one.
    """
    trainer = module.trainer
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    callback = next((each for each in callbacks if isinstance(each, FitCallback)), None)
    if callback is None or not trainer.training:
        return optimizer
    if callback.fitted is not None:
        raise RuntimeError(
            "fit_optimizer: the FitCallback has fitted a training already, and a second one makes "
            "another optimizer; give the Trainer a new FitCallback"
        )
    _check(trainer, module, 1)
    if callback.sample_batch is None and trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    return callback.fit(trainer, module, optimizer).optimizer


def _accumulated(trainer: Trainer) -> int:
    """Returns the most batches that are accumulated in a step of any epoch."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    schedules = [c.scheduling for c in callbacks if isinstance(c, GradientAccumulationScheduler)]
    return max([trainer.accumulate_grad_batches, *(n for each in schedules for n in each.values())])


def _check(trainer: Trainer, module: LightningModule, optimizers: int) -> None:
    """Raises for a training whose memory cannot be planned."""
    wrong = None
    if not module.automatic_optimization:
        wrong = "the module optimizes by itself; call headroom.fit for its model"
    elif optimizers != 1:
        wrong = f"there are {optimizers} optimizers, wanted one"
    elif type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        wrong = (
            f"the strategy is {type(trainer.strategy).__name__}, which is not planned here; wanted "
            "one device or DDP"
        )
    if wrong is not None:
        raise ValueError(f"{WHO}: {wrong}")


def _evaluated(trainer: Any) -> tuple[Any, list[str]]:
    """Returns the largest batch of the validation of a training, or None if there is none, and what
    a report says where it is not planned."""
    if not trainer.enable_validation:
        return None, []
    try:
        with generators_kept():
            loaders = trainer.val_dataloaders
            if loaders is None:  # they are made later
                loaders = trainer.fit_loop.epoch_loop.val_loop._data_source.dataloader()
            found = [sample_batch(loader, who=WHO) for loader in tree_leaves(loaders)]
            return trainer.strategy.batch_to_device(max(found, key=bytes_of)), []
    except Exception as error:  # training shall not fail for it
        return None, [f"{NOT_EVALUATED}: {error}"]


def _forward(trainer: Trainer, values: ValuesRead, module: Any, batch: Any) -> Tensor:
    """Returns the loss of ``training_step`` of a copy of the module."""
    output = _run(trainer, values, module, module.training_step, batch)
    return output["loss"] if isinstance(output, Mapping) else output


def _evaluate(trainer: Trainer, values: ValuesRead, module: Any, batch: Any) -> None:
    """Runs ``validation_step`` of a copy of the module."""
    _run(trainer, values, module, module.validation_step, batch)


def _run(trainer: Trainer, values: ValuesRead, module: Any, step: Any, batch: Any) -> Any:
    names = inspect.signature(step).parameters
    takes = [p for p in names.values() if p.kind != p.KEYWORD_ONLY]
    more = {"dataloader_idx": 0} if "dataloader_idx" in names else {}
    precision = trainer.precision_plugin
    # A copy of the module has no Trainer, and is to log nothing.
    given = {"_trainer": trainer, "log": _ignore, "log_dict": _ignore}
    attached = mock.patch.dict(vars(module), given)
    with attached, precision.forward_context(), values.answered():
        return step(batch) if len(takes) == 1 else step(batch, 0, **more)


def _ignore(*args: Any, **options: Any) -> None:
    """Logs nothing."""
