"""The training steps that are planned, as a user's loop makes them."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..amp.cast_model import cast_model
from ..checkpointing import checkpoint_every
from ..grad.accumulate import GradAccumulator
from ..nn.block import Block
from ..nn.steps import levels_for_all, save_level
from ..optim.master_weights import load_master_weights
from ..param_states.paging.handle import begin
from ..release import release_gradients
from ..step.description import Step
from ..step.optimizers import is_headroom, made_of
from ..step.pytree import map_tensors
from ..step.run import passes, update

__all__ = ["Steps"]


class Steps:
    """A loop of training steps.

    Attributes:
        given: the step, of copies of what the user gave.
    """

    def __init__(self, given: Step) -> None:
        self.given = given
        self.model: nn.Module = given.model
        self.optimizer: Any = given.optimizer
        self.scaler: Any = None
        self.accumulator: Any = None
        self._ahead: Any = None  # the batch of the next step

    def prepare(self) -> None:
        """Makes of the model and the optimizer what the step says."""
        given, model = self.given, self.model
        for param in model.parameters():
            param.grad = None
        before: dict[Tensor, Tensor] = {}
        if given.dtype is not None:
            before = {x: x.data for x in (*model.parameters(), *model.buffers())}
            cast_model(model, given.dtype)
        if given.save is not None:
            _set_save(model, given.save)
        if given.checkpoint_every is not None:
            checkpoint_every(model, given.checkpoint_every)
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            # Of whole parameters, whose sizes optimizers see of shards too.
            self.optimizer = made_of(self.optimizer, model)
        self.distribute()
        if given.dtype is not None and given.offload is None and is_headroom(self.optimizer):
            # It keeps the bits that weights lose, and with them the rest of its states.
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            # Shards have been made since, and are of the cast weights.
            load_master_weights(self.optimizer, {p: before.get(p, p.detach()) for p in params})
        before.clear()
        if given.offload is not None:
            self.offload(given.offload, given.state_budget)
        if given.scaler:
            self.scaler = torch.amp.GradScaler(given.device.type)
        released = self.optimizer if given.release else None
        if given.accumulator or (released is not None and given.accumulation > 1):
            self.accumulator = GradAccumulator(model)
        if released is not None:
            size: dict[str, Any] = (
                {} if given.release is True else {"bucket_bytes": int(given.release)}
            )
            release_gradients(
                model, released, scaler=self.scaler, accumulator=self.accumulator, **size
            )

    def distribute(self) -> None:
        """Spreads the model over ranks."""

    def offload(self, what: str, budget: int) -> None:
        """Keeps the state on the host, but for so many bytes, or steps it there."""
        begin(self.optimizer, what, budget or None)

    def begin(self, phase: str) -> None:
        """Says that a phase begins."""

    def step(self, number: int) -> None:
        """Makes a step."""
        given = self.given
        if given.prefetch and given.device.type == "cuda":
            self._ahead = self.fetched()  # beside the one before, which is freed after
        share = 1 if self.accumulator is not None else Fraction(1, given.accumulation)
        passes(
            partial(given.loss_of, self.model),
            [(given.batch, share)] * given.accumulation,
            backward=self._backward,
            begin=self.begin,
        )
        if self.optimizer is not None:
            self.begin("optimizer")
            self.step_optimizer()
            self.begin("other")
            self.optimizer.zero_grad(set_to_none=given.set_to_none)
        self.begin("other")
        self.model.zero_grad(set_to_none=given.set_to_none)

    def fetched(self) -> Any:
        """Returns memory for another batch of the loader, as a prefetcher takes it."""
        given = self.given
        return map_tensors(given.batch if given.whole is None else given.whole, torch.empty_like)

    def step_optimizer(self) -> None:
        if self.accumulator is not None:
            self.accumulator.finish()
        update(self.model, self.optimizer, self.scaler, self.given.max_grad_norm)

    def _backward(self, loss: Tensor) -> None:
        with self.accumulator.micro_batch() if self.accumulator is not None else nullcontext():
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()


def _set_save(model: nn.Module, save: str) -> None:
    """Sets the save level of every block of :mod:`headroom.nn`."""
    save_level(save)  # refuses other names
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise ValueError(
            f"save is {save!r}, but the model has no blocks of headroom.nn: headroom.patch(model) "
            "makes them of those of transformers"
        )
    for block, level in zip(blocks, levels_for_all(save, len(blocks))):
        block.save = level
