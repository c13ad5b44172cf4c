"""Adds gradients to the sums of a GradAccumulator as soon as they are ready."""

from __future__ import annotations

from torch import Tensor

from .._core.names import name_of
from ..grad.accumulate import GradAccumulator
from ..optim.base import Optimizer
from .strategy import Strategy


class Accumulation(Strategy):
    """Sums micro-batches. ``accumulator.finish()`` and ``optimizer.step()`` are as without
    release."""

    def __init__(self, optimizer: Optimizer, accumulator: GradAccumulator) -> None:
        super().__init__(optimizer)
        self._accumulator = accumulator

    @property
    def sums_over_ranks(self) -> bool:
        return self._accumulator.sums_over_ranks

    def check(self) -> None:
        groups = self.optimizer.param_groups
        mine = {p for group in groups for p in group["params"] if p.requires_grad}
        missing = mine - set(self._accumulator._params)
        if missing:
            name = name_of(groups, missing.pop())
            raise ValueError(f"the accumulator does not have {name}")

    def admit(self, param: Tensor, waits: bool) -> None:
        if not self._accumulator.is_open:
            raise RuntimeError("backward() outside the micro_batch() of the accumulator")

    def take(self, params: list[Tensor]) -> None:
        self._accumulator._take_early(params)
