"""The training steps that are planned, as a user's loop makes them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..amp.cast_model import cast_model
from ..checkpointing import checkpoint_every
from ..grad.accumulate import GradAccumulator
from ..nn.block import Block, save_level
from ..optim import release_gradients
from .forward import autocast, loss_of
from .sharding import Sharding

__all__ = ["Setup", "Steps", "generators_kept"]


@dataclass(frozen=True)
class Setup:
    """What is planned. Advice replaces some of it and traces again."""

    model: nn.Module
    optimizer: Any
    batch: Any
    loss: Callable[..., Tensor] | None = None
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    device: str = "cpu"
    amp: torch.dtype | None = None
    scaler: bool = False
    save: str | None = None
    accumulation: int = 1
    accumulator: bool = False  # float32 sums of micro-batches
    release: bool | int = False  # a number is that of bytes in a bucket
    checkpoint_every: int | None = None
    max_grad_norm: float | None = None
    set_to_none: bool = True  # as in zero_grad()
    dtype: torch.dtype | None = None  # of the parameters, in the place of their own
    sharding: Sharding | None = None  # over several ranks
    steps: int = 2
    starts_short: bool = False  # the first of several steps is of one micro-batch

    def but(self, **changes: Any) -> Setup:
        """Returns the setup with some fields replaced."""
        return replace(self, **changes)

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
        if self.sharding is not None:
            found["ranks"] = str(self.sharding)
        if self.accumulation > 1:
            found["accumulation"] = str(self.accumulation)
        for name in ("accumulator", "release", "scaler"):
            if getattr(self, name):
                found[name] = "on"
        if not self.set_to_none:
            found["set to none"] = "off"
        return found


def name_of_optimizer(optimizer: Any) -> str:
    """The class of an optimizer, or of what a function makes."""
    if optimizer is None:
        return "none"
    if hasattr(optimizer, "param_groups"):
        kind = type(optimizer)
    else:
        kind = getattr(optimizer, "func", optimizer)
    module = "headroom." if getattr(kind, "__module__", "").startswith("headroom") else ""
    return module + getattr(kind, "__name__", type(kind).__name__)


class Steps:
    """A loop of training steps on copies of what the user gave."""

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        optimizer: Any,
        batch: Any,
        loss: Any,
        forward: Any,
    ) -> None:
        self.setup = setup
        self.model, self.batch = model, batch
        self.optimizer: Any = optimizer
        self.loss, self.forward = loss, forward
        self.scaler: Any = None
        self.accumulator: Any = None

    def prepare(self) -> None:
        """Makes of the model and the optimizer what the setup says."""
        setup, model = self.setup, self.model
        for param in model.parameters():
            param.grad = None
        if setup.dtype is not None:
            cast_model(model, setup.dtype)
        if setup.save is not None:
            _set_save(model, setup.save)
        if setup.checkpoint_every is not None:
            checkpoint_every(model, setup.checkpoint_every)
        self.distribute()
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            self.optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        if setup.scaler:
            self.scaler = torch.amp.GradScaler(setup.device)
        released = self.optimizer if setup.release else None
        if setup.accumulator or (released is not None and setup.accumulation > 1):
            self.accumulator = GradAccumulator(model)
        if released is not None:
            size: dict[str, Any] = (
                {} if setup.release is True else {"bucket_bytes": int(setup.release)}
            )
            release_gradients(
                model, released, scaler=self.scaler, accumulator=self.accumulator, **size
            )

    def distribute(self) -> None:
        """Spreads the model over ranks."""

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def step(self, number: int) -> None:
        """Makes a step."""
        setup = self.setup
        is_short = setup.starts_short and number == 0 and setup.steps > 1
        for _ in range(1 if is_short else setup.accumulation):
            self.begin("forward")
            loss = self._forward()
            if setup.accumulation > 1 and self.accumulator is None:
                loss = loss / setup.accumulation
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            self.begin("backward")
            with ExitStack() as stack:
                if self.accumulator is not None:
                    stack.enter_context(self.accumulator.micro_batch())
                loss.backward()
            del loss
        if self.optimizer is not None:
            self.begin("optimizer")
            self.step_optimizer()
            self.begin("other")
            self.optimizer.zero_grad(set_to_none=setup.set_to_none)
        self.begin("other")
        self.model.zero_grad(set_to_none=setup.set_to_none)

    def step_optimizer(self) -> None:
        setup = self.setup
        if self.accumulator is not None:
            self.accumulator.finish()
        if setup.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), setup.max_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _forward(self) -> Tensor:
        with autocast(self.setup.device, self.setup.amp):
            return loss_of(self.model, self.batch, self.loss, self.forward)


def _set_save(model: nn.Module, save: str) -> None:
    """Sets the save level of every block of :mod:`headroom.nn`."""
    save_level(save)  # refuses other names
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise ValueError(
            f"save is {save!r}, but the model has no blocks of headroom.nn: headroom.patch(model) "
            "makes them of those of transformers"
        )
    for block in blocks:
        block.save = save


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves the random numbers of torch, Python and numpy as they were."""
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
