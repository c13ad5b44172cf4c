"""``headroom.fit`` for loops of accelerate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..fitting import Fitted
from ..fitting.choice import Choice
from ..fitting.ranks import together
from ..planning.trace import NOT_EVALUATED
from ..step.description import Step
from ..step.micro_batches import SAMPLES, can_cut, parts, repeated, samples_of, shares
from ..step.rules import rules_of
from ..step.run import Total, passes
from .batches import moved
from .first_steps import ToldSteps
from .loops import (
    WHOLE_BATCHES,
    batches_planned,
    extra_bytes,
    fit_in_loop,
    mixed_precision,
    rule_of_parts,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["AcceleratedFit", "fit"]

WHO = "headroom.integrations.accelerate.fit"


class AcceleratedFit:
    """A model and an optimizer that :func:`fit` has made ready for ``accelerator.prepare()``.

    Attributes:
        model, optimizer: to prepare.
        fitted: what :func:`headroom.fit` found; prints as a table.
        measured: peak and time of the first steps.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        fitted: Fitted,
        step: Step,
        extra: int,
        tell: Callable[[str], Any],
    ) -> None:
        self._accelerator, self._step = accelerator, step
        self.fitted, self.model, self.optimizer = fitted, fitted.model, fitted.optimizer
        steps = accelerator.gradient_accumulation_steps
        self._parts = fitted.choice.micro_batches // batches_planned(steps)
        self.measured = ToldSteps(
            self.model,
            self.optimizer,
            accelerator.device,
            fitted,
            extra,
            steps / batches_planned(steps),
            tell if accelerator.is_main_process else lambda text: None,
        )
        self._awaits_step = False
        # Not a hook of this optimizer: while those run, none of them can be removed. It is one of
        # the process, which must not keep this object, and so the model, alive.
        hook = register_optimizer_step_post_hook(partial(_stepped, weakref.ref(self)))
        self._unhook = weakref.finalize(self, _ended, hook, self.measured)
        self._unhook.atexit = False

    def backward(self, model: nn.Module, batch: Any) -> Tensor:
        """Runs the forward and backward pass of a batch, in the micro-batches that were chosen, and
        returns its loss without its graph.

        It takes the place of the forward pass and of ``accelerator.backward(loss)``, within
        ``accelerator.accumulate(model)`` where that is used. Ranks exchange gradients once.

        Args:
            model: that ``accelerator.prepare()`` returned.
            batch: which may be smaller than others, such as the last one.
        """
        accelerator = self._accelerator
        cut = parts(batch, self._parts)
        every = shares(cut, self._step.rule, batch)
        work = [(part, share) for part, share in zip(cut, every) if share]
        if self.measured.has_ended:
            self._unhook()
        if self._awaits_step:  # the step raised, or a scaler has skipped it
            self.measured.abandon()
        self._awaits_step = accelerator.sync_gradients
        self.measured.step_began(batch)
        total = Total()
        try:
            passes(
                partial(self._step.loss_of, model),
                work,
                backward=accelerator.backward,
                around=lambda k: (
                    nullcontext() if k + 1 == len(work) else accelerator.no_sync(model)
                ),
                seen=total.add,
            )
        except BaseException:
            self.measured.abandon()
            raise
        assert total.loss is not None
        return total.loss

    def _stepped(self) -> None:
        self._awaits_step = False
        self.measured.step_ended()
        self.measured.pause()


def _stepped(fit: weakref.ref[AcceleratedFit], optimizer: Any, *given: Any) -> None:
    """Tells the fit of an optimizer that this has stepped; is called for all of them."""
    found = fit()
    if found is not None and found.optimizer is optimizer:
        found._stepped()


def _ended(hook: RemovableHandle, measured: ToldSteps) -> None:
    """Leaves nothing of what measures in the process."""
    hook.remove()
    measured.abandon()


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    optimizer: Any = torch.optim.AdamW,
    loss: Callable[..., Tensor] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    max_grad_norm: float | None = None,
    allow: Sequence[str] = (),
    choice: Choice | Mapping[str, Any] | None = None,
    tell: Callable[[str], Any] = print,
) -> AcceleratedFit:
    """Fits a training by accelerate into a budget of memory, before ``accelerator.prepare()``.

    The loop is then::

        found = fit(accelerator, model, batch, budget="6 GiB", optimizer=optimizer)
        model, optimizer, loader = accelerator.prepare(found.model, found.optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = found.backward(model, batch)
                optimizer.step()
                optimizer.zero_grad()

    Precision and accumulation are the accelerator's. The model is moved to the accelerator's
    device, and changed in place. Make a schedule of learning rates from the optimizer that is
    returned.

    Args:
        accelerator: on one device, or several with DistributedDataParallel.
        model: that is not prepared yet.
        batch: as the loader yields it; one of the longest.
        budget: bytes, or text such as "6 GiB"; None: the memory of the device.
        host_budget: bytes that the host may hold of what leaves the device, as in
            :func:`headroom.fit`.
        optimizer: of the model's parameters, or a function that makes one from a list of them.
        loss, forward: how the loss of a batch is computed, as in :func:`headroom.plan`. With
            ``forward`` a model of transformers keeps its logits.
        max_grad_norm: what the loop clips gradients to.
        allow: what may change the mathematics, as in :func:`headroom.fit`.
        choice: of the run that is resumed, ``found.fitted.choice.to_json()``, which is taken again
            without measuring, as in :func:`headroom.fit`.
        tell: is called with the table of what was chosen, and after three steps with what was
            measured, in the main process.

    Raises:
        ImportError: the package accelerate is missing.
        ValueError: the accelerator shards the model.
        headroom.fitting.DoesNotFit: no choice fits into the budget.
    """
    try:
        from accelerate import Accelerator, DistributedType
    except ImportError as error:
        raise ImportError(
            "headroom.integrations.accelerate needs the package accelerate"
        ) from error
    if not isinstance(accelerator, Accelerator):
        got = type(accelerator).__name__
        raise TypeError(f"{WHO}: accelerator is {got}, wanted an Accelerator")
    if accelerator.unwrap_model(model) is not model:
        raise ValueError(f"{WHO}: the model is prepared already; call it before prepare()")
    known = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in known:
        raise ValueError(
            f"{WHO}: the accelerator uses {accelerator.distributed_type.value}, which is not "
            "planned here; wanted one device or DistributedDataParallel"
        )
    device = accelerator.device
    model.to(device)
    steps = batches_planned(accelerator.gradient_accumulation_steps)
    batch = moved(batch, device)
    ahead = [batch] if device.type == "cpu" else []  # on CUDA it waits on the CPU
    with together():  # so that all ranks hear of an error
        extra = extra_bytes(model, batch, *ahead)
        precision = mixed_precision(accelerator, who=WHO)
        step = Step(
            model, optimizer, batch, loss, forward, device, max_grad_norm=max_grad_norm, **precision
        )
        rule = rule_of_parts(step, rules_of(step), 1)
    size = samples_of(batch) or 1
    cuts = [n for n in range(1, size + 1) if can_cut(batch, n)] if rule else [1]
    only: dict[str, Any] = {
        "release": (False,),
        "micro_batches": tuple(steps * n for n in cuts),
    }
    if forward is not None:
        only["fused_loss"] = (False,)
    fitted = fit_in_loop(
        step.but(batch=repeated(batch, steps)),
        budget=budget,
        host_budget=host_budget,
        extra=extra,
        who=WHO,
        only=only,
        allow=allow,
        choice=choice,
    )
    if rule is None:
        fitted.notes.append(WHOLE_BATCHES)
    fitted.notes.append(f"{NOT_EVALUATED}: the loop is the program's own")
    if accelerator.is_main_process:
        tell(str(fitted))
    # Autocast is the accelerator's, which it puts around the model.
    trained = step.but(batch=None, amp=None, rule=rule or SAMPLES)
    return AcceleratedFit(accelerator, fitted, trained, extra, tell)
