"""The description of a training step, which what plans, measures, fits or repeats one takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .loss import autocast, loss_of
from .micro_batches import SAMPLES, largest_part

__all__ = ["Step", "class_of_optimizer", "name_of_optimizer"]


@dataclass(frozen=True)
class Step:
    """A training step: what is trained, on what, and how.

    Attributes:
        model, optimizer, batch, loss, forward: as in :func:`headroom.plan`.
        device: where it runs; None until it is known.
        capability: the compute capability of the GPU that it is planned for; None: not told.
        amp: the dtype of autocast, or None.
        scaler: the :class:`torch.amp.GradScaler` that scales losses; True for a new one; or False.
        save, checkpoint_every: what blocks keep, or None where that stays as it is.
        accumulation: micro-batches per step, each as large as ``batch``.
        prefetch: whether the next batch is on the device while a step runs.
        whole: the batch of the loader that ``batch`` is a part of; None: itself.
        part_of: gives the largest of so many micro-batches, where the loader of a loop makes them;
            None: they are cut from ``batch``.
        offload: "state" where the state of the optimizer lies on the host, "step" where the step
            runs there, too; None: as the optimizer has it.
        state_budget: the bytes of a "state" that stay on the device, with those of the ring.
        weights: as in :func:`headroom.patch`: which blocks have their weights on the host; None:
            as the model has it.
        evaluates, evaluated: an evaluation between two steps, called with the model and its batch;
            None: there is none, or it is not known.
        accumulator: whether the gradients of micro-batches are summed in float32.
        release: whether gradients are released in the backward pass; or the bytes of a bucket.
        max_grad_norm: gradients are clipped to it, or None.
        set_to_none: as in ``zero_grad()``.
        dtype: of the parameters, in the place of their own, or None.
        sharding: of several ranks, or None.
        steps: how many of them are planned.
        rule: what the loss is a mean over, by which micro-batches are weighed; see
            :mod:`headroom.step.micro_batches`.
    """

    model: nn.Module
    optimizer: Any
    batch: Any
    loss: Callable[..., Tensor] | None = None
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    device: torch.device | None = None
    amp: torch.dtype | None = None
    scaler: Any = False
    save: str | None = None
    accumulation: int = 1
    prefetch: bool = False
    whole: Any = None
    part_of: Callable[[int], Any] | None = None
    offload: str | None = None
    state_budget: int = 0
    weights: Any = None
    evaluates: Callable[[nn.Module, Any], Any] | None = None
    evaluated: Any = None
    accumulator: bool = False
    release: bool | int = False
    checkpoint_every: int | None = None
    max_grad_norm: float | None = None
    set_to_none: bool = True
    dtype: torch.dtype | None = None
    capability: tuple[int, int] | None = None
    sharding: Any = None
    steps: int = 2
    rule: str = SAMPLES

    def but(self, **changes: Any) -> Step:
        """Returns the step with some fields replaced."""
        return replace(self, **changes)

    def copied(self, copy: Callable[[Any], Any]) -> Step:
        """Returns the step with copies of what it is made of; ``copy`` gets all of it at once, so
        that what is shared stays shared."""
        names = (
            "model",
            "optimizer",
            "batch",
            "whole",
            "loss",
            "forward",
            "evaluates",
            "evaluated",
        )
        return replace(self, **copy({name: getattr(self, name) for name in names}))

    def part(self, count: int) -> Any:
        """Returns the one of ``count`` micro-batches that takes the most memory."""
        return largest_part(self.batch, count) if self.part_of is None else self.part_of(count)

    def loss_of(self, model: nn.Module, batch: Any, *, trains: bool = True) -> Tensor:
        """Returns the loss of a batch, which must require a gradient if ``trains``."""
        with autocast(self.device.type if self.device else "cpu", self.amp):
            return loss_of(model, batch, self.loss, self.forward, trains=trains)

    def described(self) -> dict[str, str]:
        """Returns the options in words, without those that are as usual."""
        found = {"optimizer": name_of_optimizer(self.optimizer)}
        if self.amp is not None:
            found["amp"] = str(self.amp).removeprefix("torch.")
        if self.dtype is not None:
            found["parameters in"] = str(self.dtype).removeprefix("torch.")
        for name in ("save", "checkpoint_every", "max_grad_norm"):
            if (value := getattr(self, name)) is not None:
                found[name.replace("_", " ")] = str(value)
        if self.capability is not None:
            found["compute capability"] = ".".join(map(str, self.capability))
        if self.sharding is not None:
            found["ranks"] = str(self.sharding)
        if self.offload is not None:
            found[self.offload] = "on the host"
        if self.weights is not None:
            found["weights"] = "on the host"
        if self.evaluates is not None:
            found["evaluation"] = "between steps"
        if self.accumulation > 1:
            found["accumulation"] = str(self.accumulation)
        for name in ("accumulator", "release", "scaler", "prefetch"):
            if getattr(self, name):
                found[name] = "on"
        if not self.set_to_none:
            found["set to none"] = "off"
        return found


def class_of_optimizer(optimizer: Any) -> Any:
    """Returns the class of an optimizer, or what makes one, which may be its class."""
    if hasattr(optimizer, "param_groups"):
        return type(optimizer)
    return getattr(optimizer, "func", optimizer)


def name_of_optimizer(optimizer: Any) -> str:
    """Returns the name of the class of an optimizer, or of what makes one."""
    if optimizer is None:
        return "none"
    kind = class_of_optimizer(optimizer)
    module = "headroom." if getattr(kind, "__module__", "").startswith("headroom") else ""
    return module + getattr(kind, "__name__", type(kind).__name__)
