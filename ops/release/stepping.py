"""Steps each parameter as soon as its gradient is ready, clipped by the norm of all if wanted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from ..functional.unscale_norm import grad_norm
from ..grad.norm import Measured, are_local, clip_coef, measure
from ..optim.base import Optimizer
from ..param_states.errors import explained
from ..param_states.plan import like_param
from .strategy import InBackward


class Norms:
    """Collects the norms of the gradients of a step, each with all its shards."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parts: list[tuple[list[Tensor], Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def params(self) -> list[Tensor]:
        """Returns the parameters whose gradients were measured."""
        return [param for params, _ in self._parts for param in params]

    def measure(self, params: list[Tensor], grad_scale: Tensor | None) -> Tensor:
        """Returns the norm of each gradient, infinite or NaN if one of its elements is."""
        grads, scale = [like_param(param.grad, param) for param in params], grad_scale
        try:
            if are_local(grads):
                device = grads[0].device
                norms = torch.zeros(len(grads), dtype=torch.float32, device=device)
                scale = None if scale is None else scale.to(device, torch.float32)
                grad_norm(grads, norms=norms, grad_scale=scale)
            else:
                home = grads[0].device
                parts = [measure([grad], grad_scale=scale).norm for grad in grads]
                norms = torch.stack([part.to(home) for part in parts])
        except (RuntimeError, NotImplementedError) as error:
            raise explained(self._optimizer, error, params, grads) from error
        self._parts.append((params, norms))
        return norms

    def total(self, max_norm: float | None) -> Measured:
        """Returns what :func:`headroom.grad.norm.measure` would, of all gradients together."""
        if not self._parts:
            return measure([])
        home = self._parts[0][1].device
        norms = torch.cat([part.to(home) for _, part in self._parts]).double()
        norm, flags = torch.linalg.vector_norm(norms), ~norms.isfinite()
        coef = clip_coef(norm, math.inf if max_norm is None else max_norm)
        culprit = torch.where(flags.any(), flags.float().argmax(), -1)
        where = range(len(norms))
        return Measured(norm.float(), flags.any().float(), coef.float(), [(where, culprit)])


class Stepping(InBackward):
    """Steps the parameters of each bucket.

    With a scaler, or an optimizer that skips steps, a parameter whose gradient is not finite is
    skipped. After a backward under :meth:`measuring`, the step knows all gradients.
    """

    def __init__(self, optimizer: Optimizer, scaler: GradScaler | None = None) -> None:
        self._scaler = scaler
        self._is_measuring = False
        super().__init__(optimizer)

    def restart(self) -> None:
        super().restart()
        self._norms = Norms(self.optimizer)
        self._verdict: Measured | None = None  # of a backward under measuring()
        self._flag: Tensor | None = None  # the scaler's

    def admit(self, param: Tensor, waits: bool) -> None:
        self._tell_scaler()
        if not self._is_measuring:
            if not self._seen:
                self.check()
            self._check_measured()
        super().admit(param, waits)

    def _check_measured(self) -> None:
        """Raises if the step needs a backward under :meth:`measuring` that was not made."""

    def _tell_scaler(self) -> None:
        """Registers a flag with the scaler, as if ``unscale_()`` had been called: ``step()`` then
        neither unscales nor looks for gradients."""
        if self._scaler is None:
            return
        optimizer_state = self._scaler._per_optimizer_states[id(self.optimizer)]
        flags = optimizer_state["found_inf_per_device"]
        if optimizer_state["stage"] is OptState.STEPPED:
            raise RuntimeError("update() has not been called since the last step()")
        if self._flag is not None and any(flag is self._flag for flag in flags.values()):
            return
        self.restart()  # torch's scaler does not call a step() that it skips
        scale, _ = self._scaler._check_scale_growth_tracker("step")
        self._flag = torch.zeros((), dtype=torch.float32, device=scale.device)
        optimizer_state["stage"] = OptState.UNSCALED
        optimizer_state["found_inf_per_device"] = {scale.device: self._flag}

    # ---- a bucket ---------------------------------------------------------------------------

    def take(self, params: list[Tensor]) -> None:
        scale = self._grad_scale
        if self._is_measuring:
            self._norms.measure(params, scale)
        elif self._verdict is not None:
            coef = None if self.max_norm is None else self._verdict.clip_coef
            self._apply(params, scale, self._verdict.found_inf, coef)
        elif self._scaler is not None or self._needs_norms or self.optimizer._skips_nonfinite:
            self._step_finite(params, scale)
        else:
            self._apply(params, scale)

    @property
    def _grad_scale(self) -> Tensor | None:
        """Returns the factor that gradients are to be divided by."""
        return self.optimizer.grad_scale if self._scaler is None else self._scaler._scale

    _needs_norms = False  # whether a step measures gradients although no scaler asks for it

    def _clip_coef(self) -> Tensor | None:
        """Returns the factor that clips gradients before all are known."""
        return None

    def _step_finite(self, params: list[Tensor], scale: Tensor | None) -> None:
        """Measures the gradients, and skips parameters whose gradient is not finite."""
        flags = (~self._norms.measure(params, scale).isfinite()).float()
        if self._flag is not None:
            self._flag.copy_(torch.maximum(self._flag, flags.amax().to(self._flag.device)))
        coef = self._clip_coef()
        if flags.device.type == "cpu" and not flags.any():
            self._apply(params, scale, clip_coef=coef)
            return
        for param, flag in zip(params, flags):
            self._apply([param], scale, flag, coef)

    def _conclude(self) -> None:
        measured, optimizer = self._verdict, self.optimizer
        if measured is None and self._norms:
            measured = self._norms.total(self.max_norm)
            optimizer.grad_norm = measured.norm
            self._keep_norm(measured.norm)
        optimizer._measured, optimizer._measured_params = measured, self._norms.params
        if measured is not None:
            optimizer._prepared_count(measured.found_inf)()

    def _keep_norm(self, norm: Tensor) -> None:
        """Keeps the norm of a step for the next one."""

    # ---- a backward that measures -----------------------------------------------------------

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Encloses a backward that measures gradients, and steps nothing."""
        if self._scaler is not None and self._scaler._scale is not None:  # else there was no step
            self._tell_scaler()
        self.check_unseen()
        self._norms = Norms(self.optimizer)
        self._is_measuring = True
        try:
            yield
        finally:
            self._is_measuring = False
        self._verdict = verdict = self._norms.total(self.max_norm)
        self._seen = set()
        self.optimizer.grad_norm = verdict.norm
        skips = self._scaler is not None or self.max_norm is not None
        if not (skips or self.optimizer._skips_nonfinite):
            verdict.found_inf = torch.zeros_like(verdict.found_inf)
        if self._flag is not None:
            self._flag.copy_(verdict.found_inf)


class ByPreviousNorm(Stepping):
    """Clips by the norm of the previous step: ``clip="previous"``."""

    _needs_norms = True

    def check(self) -> None:
        _check_limit("previous", self.max_norm)

    def _clip_coef(self) -> Tensor | None:
        return None if self.norm is None else clip_coef(self.norm, self.max_norm)

    def _keep_norm(self, norm: Tensor) -> None:
        previous = torch.zeros_like(norm) if self.norm is None else self.norm
        self.norm = torch.where(norm.isfinite(), norm, previous.to(norm.device))


class TwoPass(Stepping):
    """Clips by the norm that a first backward has measured: ``clip="two-pass"``."""

    def check(self) -> None:
        _check_limit("two-pass", self.max_norm)

    def _check_measured(self) -> None:
        if self._verdict is None:
            raise RuntimeError("clip='two-pass' needs a backward under measure() before this one")


def _check_limit(clip: str, max_norm: float | None) -> None:
    if max_norm is None:
        raise ValueError(f"clip={clip!r} needs an optimizer with max_grad_norm")
