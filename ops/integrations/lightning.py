"""``headroom.fit`` for the Trainer of Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ..fitting import Fitted
from ..planning.steps import generators_kept
from .batches import repeated, sample_batch
from .first_steps import FirstSteps
from .loops import batches_planned, extra_bytes, fit_in_loop

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError("headroom.integrations.lightning needs the package lightning") from error

__all__ = ["FitCallback"]

WHO = "FitCallback"


class FitCallback(Callback):
    """Fits the training of a Lightning Trainer into a budget of memory: by the save levels of the
    model's blocks, and on request by its loss.

    When the training starts, :func:`headroom.fit` plans a step with the module's own
    ``training_step``, precision, accumulation and optimizer on a batch of the loader. The loader
    and ``configure_optimizers`` are the module's own: for an optimizer that takes less, or smaller
    batches, change them there. Checkpoints do not change.

    Args:
        budget: bytes, or text such as "6 GiB"; None: the memory of the device.
        fused_loss: whether models of transformers may compute their loss without logits;
            ``training_step`` must then not look at logits.
        sample_batch: a batch as the loader yields it, where the first one is not among the
            longest. None: the first one.
        tell: is called with the table of what was chosen, and after three steps with what was
            measured, on the first rank.

    Attributes:
        fitted: what :func:`headroom.fit` found, from the start of the training on.
        measured: peak and time of the first steps.
        extra: bytes of the budget that the Trainer itself holds.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        fused_loss: bool = False,
        sample_batch: Any = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.budget, self.fused_loss = budget, fused_loss
        self.sample_batch, self.tell = sample_batch, tell
        self.fitted: Fitted | None = None
        self.measured: FirstSteps | None = None
        self.extra = 0
        self._step, self._batches = 0, 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Is called by the Trainer when everything is made and loaded."""
        if self.fitted is None:
            self.fitted = self._fitted(trainer, pl_module)
            self._say(trainer, str(self.fitted))
        self.measured = FirstSteps(
            pl_module,
            trainer.optimizers[0],
            pl_module.device,
            self.fitted.predicted_peak + self.extra,
            self.fitted.predicted_seconds * self._batches,
            partial(self._say, trainer),
        )
        self._step = trainer.global_step
        self.measured.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *given: Any, **options: Any
    ) -> None:
        """Is called by the Trainer after each batch."""
        if self.measured is not None and trainer.global_step > self._step:
            self._step = trainer.global_step
            self.measured.step_ended()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Is called by the Trainer at the end."""
        if self.measured is not None:
            self.measured.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Is called by the Trainer after an error."""
        if self.measured is not None:
            self.measured.abandon()

    def _say(self, trainer: Trainer, text: str) -> None:
        if trainer.is_global_zero:
            self.tell(text)

    def _fitted(self, trainer: Trainer, module: LightningModule) -> Fitted:
        _check(trainer, module)
        batch = self.sample_batch
        if batch is None:
            batch = sample_batch(trainer.train_dataloader, who=WHO)
        with generators_kept():
            batch = trainer.strategy.batch_to_device(batch)
        steps = batches_planned(trainer.accumulate_grad_batches)
        self._batches = trainer.accumulate_grad_batches / steps
        self.extra = extra_bytes(module, batch)
        return fit_in_loop(
            module,
            repeated(batch, steps),
            budget=self.budget,
            extra=self.extra,
            who=WHO,
            only={
                "release": (False,),
                "micro_batches": (steps,),
                "optimizer": ("given",),
                "weights": ("given",),
                "fused_loss": (False, True) if self.fused_loss else (False,),
            },
            optimizer=trainer.optimizers[0],
            forward=partial(_forward, trainer),
            device=module.device,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            max_grad_norm=trainer.gradient_clip_val or None,
        )


def _check(trainer: Trainer, module: LightningModule) -> None:
    """Raises for a training whose memory cannot be planned."""
    wrong = None
    if not module.automatic_optimization:
        wrong = "the module optimizes by itself; call headroom.fit for its model"
    elif len(trainer.optimizers) != 1:
        wrong = f"there are {len(trainer.optimizers)} optimizers, wanted one"
    elif type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        wrong = (
            f"the strategy is {type(trainer.strategy).__name__}, which is not planned here; wanted "
            "one device or DDP"
        )
    if wrong is not None:
        raise ValueError(f"{WHO}: {wrong}")


def _forward(trainer: Trainer, module: Any, batch: Any) -> Tensor:
    """Returns the loss of ``training_step`` of a copy of the module."""
    step = module.training_step
    takes = [p for p in inspect.signature(step).parameters.values() if p.kind != p.KEYWORD_ONLY]
    with _attached(module, trainer), trainer.precision_plugin.forward_context():
        output = step(batch) if len(takes) == 1 else step(batch, 0)
    return output["loss"] if isinstance(output, Mapping) else output


@contextmanager
def _attached(module: Any, trainer: Trainer) -> Iterator[None]:
    """Gives a copy of the module the Trainer that copies do not have, without its logs."""
    given = {"_trainer": trainer, "log": _ignore, "log_dict": _ignore}
    before = {name: vars(module)[name] for name in given if name in vars(module)}
    vars(module).update(given)
    try:
        yield
    finally:
        for name in given:
            vars(module).pop(name)
        vars(module).update(before)


def _ignore(*args: Any, **options: Any) -> None:
    """Logs nothing."""
