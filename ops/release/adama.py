"""AdamA: adds the gradients of micro-batches to the moments of Adam, without a buffer for sums.

The first moment becomes that of a step with the mean gradient ``G = sum(share * grad)``, except for
rounding. The second one takes the squares of the parts in place of the square of their sum,

    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * sum((share * grad) ** 2)

(Zhang et al., arXiv:2305.19982). The square of the sum cannot be had from the moments alone: to add
another micro-batch to it, a step needs ``beta1 * m + (1 - beta1) * G``, ``beta2 * v + (1 - beta2) *
G**2`` and ``G``, three numbers for each element, and the state has two. A GradAccumulator is the
third.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .._core.dtensor import local_part
from .._core.names import name_of
from ..functional.accumulate import accumulate_
from ..optim.adam import Adam
from ..optim.base import Optimizer
from ..param_states.plan import like_param
from .strategy import InBackward

WHOLE = 1 - 1e-6  # shares that add up to one, rounded
NEEDS = "accumulate_into_state=True"


class IntoMoments(InBackward):
    """Adds gradients to the moments, and steps with those of the last micro-batch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._share: float | None = None  # of the micro-batch that runs
        self._adds = False  # whether gradients go to the moments, with no step
        super().__init__(optimizer)

    def restart(self) -> None:
        super().restart()
        self._shares = 0.0  # of the micro-batches that the moments have
        self._folded: set[Tensor] = set()  # parameters with gradients in the moments

    @property
    def has_begun(self) -> bool:
        return bool(self._seen or self._folded)

    def admit(self, param: Tensor, waits: bool) -> None:
        if not self._seen:
            self.check()
        if self._shares and self._share is None:
            raise RuntimeError("backward() outside micro_batch(), after one")
        super().admit(param, waits)

    @contextlib.contextmanager
    def micro_batch(self, share: float) -> Iterator[None]:
        """Encloses the backward of a micro-batch with this share of the samples."""
        if not 0 < share <= 2 - WHOLE - self._shares:
            raise ValueError(f"got a share of {share}, after shares of {self._shares} together")
        self.check_unseen()
        is_last = self._shares + share >= WHOLE
        self._share, self._adds = share, not is_last
        try:
            yield
        finally:
            self._share, self._adds = None, False
        self._shares += share
        if not is_last:
            self._folded |= self._seen
            self._seen = set()

    def take(self, params: list[Tensor]) -> None:
        if self._adds:
            for param in params:
                self._fold(param)
            return
        coef = None
        if self._share is not None and self._share < 1.0:
            coef = torch.full((), self._share, dtype=torch.float32, device=params[0].device)
        self._apply(params, clip_coef=coef)

    def _fold(self, param: Tensor) -> None:
        """Adds a gradient to the moments, divided by beta so that the decay of the step with the
        last micro-batch cancels."""
        group = self.optimizer.param_groups[self.places[param]]
        entry = self.optimizer._entry(param, group)
        beta1, beta2 = map(float, group["betas"])
        share = -self._share if group["maximize"] else self._share
        grad = local_part(like_param(param.grad, param))
        self.has_stepped = True
        accumulate_([local_part(entry["exp_avg"])], [grad], factor=share * (1 - beta1) / beta1)
        grad = grad.float()
        value = share * share * (1 - beta2) / beta2
        local_part(entry["exp_avg_sq"]).addcmul_(grad, grad, value=value)

    def check_finish(self, max_grad_norm: float | None) -> None:
        if 0 < self._shares < WHOLE:
            raise RuntimeError(f"step() after micro-batches with shares of {self._shares} together")
        if not self.has_begun:  # micro-batches without gradients
            self._shares = 0.0
        super().check_finish(max_grad_norm)

    def finish(self) -> None:
        for param in self._folded - self._seen:
            param.grad = torch.zeros_like(param)
        super().finish()

    # ---- what it refuses --------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        optimizer = self.optimizer
        if optimizer._paging is not None:
            raise ValueError(
                f"{NEEDS} does not go with states on the host, which every micro-batch would be "
                "copied for; use an accumulator"
            )
        if not isinstance(optimizer, Adam):
            raise TypeError(f"{NEEDS} wants Adam or AdamW, got {type(optimizer).__name__}")
        if optimizer.defaults.get("nonfinite", "propagate") != "propagate":
            raise ValueError(
                f"{NEEDS} needs nonfinite='propagate': a gradient in a moment cannot be taken back"
            )
        for group in optimizer.param_groups:
            if 0.0 in map(float, group["betas"]):
                raise ValueError(f"{NEEDS} needs betas above 0, got {group['betas']}")
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                raise ValueError(f"{NEEDS} needs decoupled weight decay, AdamW's")

    def check_moments(self) -> None:
        """Raises if a moment has fewer bits than float32."""
        groups = self.optimizer.param_groups
        for group in groups:
            for param in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    entry = self.optimizer.state.get(param, {})
                    slot = self.optimizer._layout(param, group).slot(name)
                    dtype = entry[name].dtype if name in entry else slot.dtype or param.dtype
                    if dtype != torch.float32:
                        raise ValueError(
                            f"{NEEDS} needs float32 moments, in which a micro-batch is not rounded "
                            f"away, but those of {name_of(groups, param)} are {dtype}; use an "
                            "accumulator"
                        )
