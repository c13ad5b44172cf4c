"""Dynamic loss scaling: a drop-in for :class:`torch.amp.GradScaler`."""

from __future__ import annotations

import math
from collections import deque
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._core.capture import is_capturing, refuse_in_capture
from .._core.dtensor import local_part, shard_groups
from .._core.grouping import grouped
from .._core.names import bare_name_of
from .._core.registration import FLOATS
from .._core.text import quoted
from ..functional.unscale_norm import unscale_norm_
from ..functional.update_scale import update_scale_
from ..grad.norm import any_rank
from ..optim.base import Optimizer
from ..optim.counts import LateCounts

SMALLEST = 2.0**-126  # the smallest scale whose inverse is finite and exact in float32
HISTORY = 8  # scales that the error message shows
LIVE = ("_hysteresis_tracker", "_culprits", "_last_culprits", "_skips", "_scales", "_pending")


class GradScaler(torch.amp.GradScaler):
    """Loss scaling with torch's arguments, methods, errors and state, and bounds on the scale.

    With Headroom's optimizers a step reads every gradient twice and writes none: the first pass
    checks and, if the optimizer clips, measures; the second updates. Nothing waits for the device:
    a step with an overflow is skipped on the device (weights, moments and counters keep their
    bytes), and :meth:`step` returns the flag, a float32 tensor that is 1 after an overflow and 0
    otherwise. Gradients stay scaled, unless :meth:`unscale_` was called. Other optimizers are
    treated as torch treats them: gradients are unscaled in place, and a skipped step is not called.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale, max_scale: bounds of the scale. Torch has no minimum, and its scale can fall to
            0, after which every step is skipped; the default keeps the inverse of the scale finite.
        hysteresis: the number of overflows since the scale last grew at which it falls
            (Megatron-LM's rule; 1 is torch's).
        max_consecutive_skips: raise RuntimeError from :meth:`update` after more overflows in a row
            than this, with the history of the scale and the name of the culprit. On CUDA the count
            is read without waiting, so the error may come a few steps late. Replays of a CUDA graph
            count, but do not raise: the next :meth:`update` that is not captured does. None: never.
        synchronize: ask the device before calling ``optimizer.step()`` and skip the call, as torch
            does for optimizers that are not fused, for code that detects a skipped step by the
            missing call. :meth:`step` then returns what the call returned, or None. (Code that
            passes a closure to :meth:`step`, as accelerate does, gets this behavior anyway.)

    Example::

        optimizer = headroom.optim.AdamW(model.parameters(), max_grad_norm=1.0)
        scaler = headroom.amp.GradScaler("cpu")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(4, 3)).square().mean()
            scaler.scale(loss).backward()
            skipped = scaler.step(optimizer)  # unscales, checks, clips and updates
            scaler.update()
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = SMALLEST,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        synchronize: bool = False,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = hysteresis
        self._init_hysteresis_tracker = hysteresis
        self._max_consecutive_skips = max_consecutive_skips
        self._synchronize = synchronize
        self._forget()
        if self._enabled:
            self._check_arguments()

    def _check_arguments(self) -> None:
        scale, low, high = self._init_scale, self._min_scale, self._max_scale
        if not 0 < scale < math.inf:
            raise ValueError(f"init_scale must be a finite number > 0, got {scale}")
        if not 1 < self._growth_factor < math.inf:
            raise ValueError(
                f"growth_factor must be a finite number > 1, got {self._growth_factor}"
            )
        if not 0 < self._backoff_factor < 1:
            raise ValueError(f"backoff_factor must be in (0, 1), got {self._backoff_factor}")
        if self._growth_interval < 1 or self._hysteresis < 1:
            raise ValueError(
                "growth_interval and hysteresis must be at least 1, got "
                f"{self._growth_interval} and {self._hysteresis}"
            )
        if not 0 <= low <= scale <= high:
            raise ValueError(
                f"wanted 0 <= min_scale <= init_scale <= max_scale, got {low}, {scale}, {high}"
            )
        limit = self._max_consecutive_skips
        if limit is not None and limit < 0:
            raise ValueError(f"max_consecutive_skips must be >= 0, got {limit}")

    def _forget(self) -> None:
        """Resets what belongs to the running process and is not saved."""
        self._hysteresis_tracker: Tensor | None = None
        # Optimizer, parameters and index of the first gradient that is not finite, for each check
        # since the last update, and for the checks before it.
        self._culprits: list[tuple[torch.optim.Optimizer, list[Tensor], Tensor]] = []
        self._last_culprits: list[tuple[torch.optim.Optimizer, list[Tensor], Tensor]] = []
        self._skips: Tensor | None = None  # overflows in a row
        self._scales: deque[Tensor] = deque(maxlen=HISTORY)
        self._pending = LateCounts()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        refuse_in_capture("the loss scale")
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full(
            (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
        )
        if self._max_consecutive_skips is not None:
            self._skips = torch.zeros((), dtype=torch.int64, device=dev)

    # ---- unscale_ and step ----------------------------------------------------------------------

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # The name is torch's: its unscale_(), and its step() with fused optimizers, call this.
        params = [p for group in optimizer.param_groups for p in group["params"]]
        params = [p for p in params if p.grad is not None]
        if any(p.grad.layout != torch.strided or p.grad.dtype not in FLOATS for p in params):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16 and any(p.grad.dtype == torch.float16 for p in params):
            raise ValueError("Attempting to unscale FP16 gradients.")
        flags = {}
        for device, members in grouped(params, lambda param: param.grad.device).items():
            flags[device] = torch.zeros((), dtype=torch.float32, device=device)
            culprit = torch.full((), -1, dtype=torch.int64, device=device)
            with torch.no_grad():
                unscale_norm_(
                    [local_part(param.grad) for param in members],
                    found_inf=flags[device],
                    culprit=culprit,
                    clip_coef=inv_scale.to(device),
                )
            self._culprits.append((optimizer, members, culprit))
        # Ranks that hold shards of the same gradients must skip together.
        any_rank(flags, dict.fromkeys(g for param in params for g in shard_groups(param.grad)))
        return flags

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales, checks and steps, or skips the step.

        Returns the overflow flag with Headroom's optimizers, and what ``optimizer.step()`` returned
        with others. ``kwargs`` go to ``optimizer.step()``, such as ``max_grad_norm``.
        """
        ours = isinstance(optimizer, Optimizer) and self._enabled and not self._synchronize
        if not ours or args or "closure" in kwargs:
            return super().step(optimizer, *args, **kwargs)
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        unscaled = state["stage"] is OptState.UNSCALED
        recorded = state["found_inf_per_device"] or any(
            p.grad is not None for group in optimizer.param_groups for p in group["params"]
        )
        if not recorded:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        scale = self._scale
        flags = [flag.to(scale.device) for flag in state["found_inf_per_device"].values()]
        optimizer.grad_scale = None if unscaled else scale
        optimizer.found_inf = torch.stack(flags).amax() if flags else None
        optimizer.check_finite = not unscaled
        try:
            optimizer.step(**kwargs)
            found_inf, measured = optimizer.found_inf, optimizer._measured
        finally:
            del optimizer.grad_scale, optimizer.found_inf, optimizer.check_finite
        state["stage"] = OptState.STEPPED
        if measured is not None:
            for where, culprit in measured.culprits:
                members = [optimizer._measured_params[i] for i in where]
                self._culprits.append((optimizer, members, culprit))
            flag = measured.found_inf.to(scale.device)
            found_inf = flag if found_inf is None else torch.maximum(flag, found_inf)
        if not unscaled:
            state["found_inf_per_device"] = {scale.device: found_inf}
        return found_inf

    # ---- update ---------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale from the flags of the steps since the last call, on the device, or sets
        it to ``new_scale``.

        Raises:
            RuntimeError: more than ``max_consecutive_skips`` overflows in a row. The scale has been
                updated then, and training may go on.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            if isinstance(new_scale, float) and not 0 < new_scale < math.inf:
                raise ValueError(f"new_scale must be a finite number > 0, got {new_scale}")
            super().update(new_scale)
            self._last_culprits, self._culprits = self._culprits, []
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        flags = [
            flag.to(scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        found_inf = torch.stack(flags).amax()
        update_scale_(
            scale,
            growth_tracker,
            found_inf,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            min_scale=self._min_scale,
            max_scale=self._max_scale,
            hysteresis=self._hysteresis,
            hysteresis_tracker=self._hysteresis_tracker,
        )
        self._per_optimizer_states.clear()
        self._last_culprits, self._culprits = self._culprits, []
        if self._max_consecutive_skips is not None:
            self._watch(found_inf, scale, self._max_consecutive_skips)

    def _watch(self, found_inf: Tensor, scale: Tensor, limit: int) -> None:
        if self._skips is None:
            refuse_in_capture("the number of skipped steps")
            self._skips = torch.zeros((), dtype=torch.int64, device=scale.device)
        self._skips.add_(1).mul_(found_inf != 0)  # in place, so that replays of a graph count on
        if is_capturing():  # a graph knows no host
            return
        self._scales.append(scale.clone())
        self._pending.send(self._skips)
        for count in self._pending.arrived():
            if count > limit:
                self._pending.clear()
                raise RuntimeError(self._report(count, limit))

    def _report(self, skips: int, limit: int) -> str:
        history = " -> ".join(f"{float(scale):g}" for scale in self._scales)
        name = self.culprit()
        culprit = f"; the first gradient that is not finite is that of {name}" if name else ""
        return (
            f"{skips} steps in a row were skipped because gradients were infinite or NaN, more "
            f"than max_consecutive_skips={limit}. The loss scale went {history}{culprit}. Look for "
            "a NaN in the data or the forward pass, or lower the learning rate"
        )

    def culprit(self) -> str | None:
        """Returns the parameter with the first gradient that is not finite, or None if all are.

        Considers the checks since the last :meth:`update` or, if there were none, the checks before
        it. Gives the parameter's name if the optimizer was made with ``model.named_parameters()``,
        else its position in the optimizer. Waits for the device. Of a sharded gradient, looks at
        the shard of this rank; does not see gradients that the kernels do not support (float64,
        sparse).
        """
        for optimizer, members, index in self._culprits or self._last_culprits:
            if (first := int(index)) >= 0:
                return bare_name_of(optimizer.param_groups, members[first])
        return None

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's keys and ``hysteresis_tracker``; torch's scaler loads it too."""
        state = super().state_dict()
        return state | {"hysteresis_tracker": self._hysteresis_count()} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this scaler or of torch's. A scale outside this scaler's bounds is moved
        to the nearest one.

        Raises:
            ValueError: a value is missing, or is not one that a scaler can have, such as a scale
                that is NaN or infinite. The scaler stays as it was.
        """
        if not self._enabled:
            return
        if state_dict:  # torch's error about an empty one is better
            _check_state(state_dict)
            bounded = min(max(state_dict["scale"], self._min_scale), self._max_scale)
            state_dict = state_dict | {"scale": bounded}
        super().load_state_dict(state_dict)
        self._init_hysteresis_tracker = state_dict.get("hysteresis_tracker", self._hysteresis)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def _hysteresis_count(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | {"_init_hysteresis_tracker": self._hysteresis_count()}
        return {key: value for key, value in state.items() if key not in LIVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


WANTED = {  # the values of a state: type, smallest value, upper bound (excluded), in words
    "scale": (Real, 0, 2.0**128, ">= 0 that float32 has"),
    "growth_factor": (Real, math.nextafter(1, 2), math.inf, "> 1"),
    "backoff_factor": (Real, math.nextafter(0, 1), 1, "> 0 and < 1"),
    "growth_interval": (Integral, 1, 2**31, ">= 1"),
    "_growth_tracker": (Integral, 0, 2**31, ">= 0"),
    "hysteresis_tracker": (Integral, -(2**31), 2**31, "of 32 bits"),
}


def _check_state(state_dict: dict[str, Any]) -> None:
    for key, (kind, low, high, words) in WANTED.items():
        if key not in state_dict and key == "hysteresis_tracker":
            continue  # torch's
        value = state_dict.get(key)
        if not isinstance(value, kind) or not low <= value < high:
            what = "a finite number" if kind is Real else "an integer"
            raise ValueError(
                f"the loaded state of the scaler has {key}={quoted(repr(value))}, wanted {what} "
                f"{words}"
            )
