"""Offers gradient release to a training loop: a function, and the handle that it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from .._core.randomness import generators_kept
from .._core.ranks import fsdp_class
from ..grad.accumulate import GradAccumulator
from ..optim.base import Optimizer, common_max_grad_norm
from ..optim.master_weights import headroom_optimizer
from ..param_states.paging import Hosting
from ..param_states.plan import check_overlap
from .accumulation import Accumulation
from .adama import NEEDS, IntoMoments
from .engine import Engine
from .stepping import ByPreviousNorm, Stepping, TwoPass
from .strategy import Strategy
from .waiting import Waiting

BUCKET_BYTES = 1 << 22
BUCKETS = 8  # or more, that the gradients of a model fill

CLIPS = {None: Stepping, "previous": ByPreviousNorm, "two-pass": TwoPass}


def bucket_of(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Returns the ``bucket_bytes`` for a model: the default, or less for a small model, whose
    gradients would all wait in one bucket.

    Args:
        dtype: that the weights will be cast to; None: they stay as they are.
    """
    gradients = sum(
        p.numel() * (p.dtype if dtype is None else dtype).itemsize
        for p in model.parameters()
        if p.requires_grad
    )
    return max(1, min(BUCKET_BYTES, gradients // BUCKETS))


def release_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: GradScaler | None = None,
    clip: Literal["previous", "two-pass"] | None = None,
    accumulator: GradAccumulator | None = None,
    accumulate_into_state: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> ReleaseHandle:
    """Steps each parameter inside backward, as soon as its gradient is ready, and frees the
    gradient, so that about one parameter's gradient is in memory at a time.

    The training loop stays as it is, ``optimizer.step()`` included, which finishes the step, and
    gives the same bits, but for the last place where it clips: the norm is put together from those
    of the gradients. Every backward needs a step after it, unless micro-batches are accumulated.
    The release lasts until ``handle.remove()``, or as long as the optimizer exists.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-3)
        handle = headroom.release_gradients(model, optimizer)
        for _ in range(3):
            model(torch.randn(4, 3)).square().mean().backward()  # steps, and frees
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()

    Args:
        model: the module whose parameters the optimizer has: all of them that require grad.
        optimizer: one of Headroom's, or accelerate's wrapper of it.
        scaler: the loop's :class:`headroom.amp.GradScaler` or :class:`torch.amp.GradScaler`.
            Gradients are unscaled by the step itself.
        clip: how to clip to the optimizer's ``max_grad_norm``, which needs the norm of all
            gradients before the first is stepped. ``"previous"``: by the norm of the previous step
            (the first is not clipped). ``"two-pass"``: exactly, after a backward under
            :meth:`ReleaseHandle.measure`.
        accumulator: sums micro-batches. Each gradient is added to its sum as soon as it is ready;
            ``accumulator.finish()`` and ``optimizer.step()`` then do what they do without release,
            so that the scaler and clipping are exact. Takes 4 bytes per parameter, and one
            gradient.
        accumulate_into_state: add the gradients of micro-batches to the moments of Adam or AdamW,
            with no buffer at all; see :meth:`ReleaseHandle.micro_batch`.
        bucket_bytes: gradients wait until they have this many bytes, and are stepped together,
            which saves launches for small parameters. The bits do not depend on it.

    Returns:
        A handle that ends the release, and measures or encloses a backward where an option needs
        it.

    Raises:
        TypeError, ValueError: the model, the optimizer or the options do not fit.

    Limits:

    - A whole step is not skipped, but with an optimizer that is stepped on the host, where
      gradients wait without ``clip`` and are stepped after the backward pass, clipped by the norm
      of all, or skipped for a scaler. Else with a scaler, with ``clip="previous"`` and with
      AdamW8bit's ``nonfinite="skip_step"``, an infinite or NaN gradient skips its own parameter;
      all others are stepped. The scaler's ``update()`` sees it. The step after
      :meth:`ReleaseHandle.measure` and that of an ``accumulator`` are exact. (Where a skip is
      possible, each parameter takes a launch of its own on CUDA.)
    - Gradients are gone after backward. Code that reads or changes them between backward and step
      (``clip_grad_norm_``, ``scaler.unscale_``, logging) finds none.
    - A backward cannot be taken back, and there is no step without one: ``zero_grad()`` before
      ``step()`` drops nothing, and ``step(closure)`` is refused.
    - A parameter gets one gradient for each step: two backwards before a step (use an
      ``accumulator``), a parameter used in two reentrant checkpoints, and ``create_graph=True``
      raise RuntimeError.
    - If the rest of backward still needs the value of a parameter, such as one that is used
      detached too, torch raises its RuntimeError about inplace operations.
    - FSDP1, and DistributedDataParallel without ``GradAccumulator(ddp_model)``, are refused:
      gradients are not final when the parameters get them. FSDP2 works; gradients are in memory
      one wrapped module at a time.
    - The backward of a compiled model makes all gradients of a graph before it hands out the first,
      so that they are not freed one by one.
    """
    inner = headroom_optimizer(optimizer, "release_gradients")
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    strategy = _strategy(inner, scaler, clip, accumulator, accumulate_into_state)
    return ReleaseHandle(model, strategy, bucket_bytes)


class ReleaseHandle:
    """Controls a release that :func:`release_gradients` began; :meth:`remove`, or leaving it as a
    context, ends it."""

    def __init__(self, model: nn.Module, strategy: Strategy, bucket_bytes: int) -> None:
        self._strategy, self._optimizer = strategy, strategy.optimizer
        _check_model(model, self._optimizer, self._strategy.sums_over_ranks)
        if not bucket_bytes >= 0:
            raise ValueError(f"bucket_bytes must be >= 0, got {bucket_bytes}")
        self._strategy.check()
        if isinstance(self._strategy, IntoMoments):
            self._strategy.check_moments()
        # A step of some parameters does not look at the others.
        groups = self._optimizer.param_groups
        check_overlap(groups, [param for group in groups for param in group["params"]])

        self._engine = Engine(self._optimizer, self._strategy, bucket_bytes)
        if not self._strategy.sums_over_ranks:
            self._engine.add_hook(model.register_forward_pre_hook(_refuse_ddp))
        self._optimizer._release_handle = self

    @property
    def active(self) -> bool:
        """Returns whether gradients are released: until :meth:`remove`."""
        return self._engine.active

    def remove(self) -> None:
        """Ends the release: the optimizer works as it did before."""
        self._engine.remove()
        self._strategy.end()
        if self._optimizer._release_handle is self:
            self._optimizer._release_handle = None

    @property
    def has_stepped(self) -> bool:
        """Returns whether parameters have been stepped, or gradients added to moments, since the
        last ``optimizer.step()``."""
        return self._strategy.has_stepped

    def abandon(self) -> None:
        """Forgets a backward that raised before it stepped a parameter, so that it can be run
        again. Gradients that wait are dropped.

        Raises:
            RuntimeError: a parameter has been stepped since the last ``optimizer.step()``, which
                cannot be taken back.
        """
        if self.has_stepped:
            raise RuntimeError(
                "the backward has stepped parameters, which cannot be taken back: call "
                "optimizer.step(), which leaves the others as they are, or load the last checkpoint"
            )
        self._engine.abandon()

    def __enter__(self) -> ReleaseHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Tensor | None]:
        """Returns what ``clip="previous"`` needs to resume with the same bits: the norm of the last
        step."""
        return {"norm": self._strategy.norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned."""
        norm = state_dict["norm"]
        self._strategy.norm = None if norm is None else norm.clone()

    # ---- around backward ------------------------------------------------------------------------

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Encloses a backward that only measures the gradients, and frees them.

        The next backward, on the same loss, steps with what was found: clipped by the norm of all
        gradients if the optimizer has ``max_grad_norm``, and skipped altogether if one was not
        finite and a scaler, clipping or ``nonfinite="skip_step"`` asks for that.

        Either call ``backward(retain_graph=True)`` inside, and ``backward()`` after it, or compute
        the loss twice: random numbers then go on as if it had not run, so that dropout drops the
        same elements. Other things that a forward changes (BatchNorm's averages) change
        twice.

        Example::

            optimizer = headroom.optim.AdamW(model.parameters(), max_grad_norm=1.0)
            handle = headroom.release_gradients(model, optimizer, clip="two-pass")
            x = torch.randn(4, 3)
            with handle.measure():
                model(x).square().mean().backward()
            model(x).square().mean().backward()
            optimizer.step()

        Raises:
            RuntimeError: micro-batches are accumulated, or a backward has had no step.
        """
        if not isinstance(self._strategy, Stepping):
            raise RuntimeError("measure() does not go with the accumulation of micro-batches")
        devices = {param.device for param in self._strategy.places if param.is_cuda}
        with self._strategy.measuring(), self._engine.dropping_on_error():
            with generators_kept(*devices):
                yield
            self._engine.flush()

    @contextlib.contextmanager
    def micro_batch(self, share: float) -> Iterator[None]:
        """Encloses the forward and backward of a micro-batch whose loss is a mean over ``share`` of
        the samples of all: 1/4, if there are four of one size. Once the shares add up to 1, the
        parameters are stepped. Needs ``accumulate_into_state=True``.

        The first moment becomes that of a step with the mean gradient, except for rounding. The
        second one takes the squares of the parts in place of the square of their sum, ``exp_avg_sq
        = beta2 * exp_avg_sq + (1 - beta2) * sum((share * grad) ** 2)``, AdamA's rule (Zhang et al.,
        arXiv:2305.19982): as much for gradients that are all noise, and n times less for n equal
        ones. An ``accumulator`` gives the square of the sum.

        Between micro-batches the optimizer's state is half a step, not to be saved; and an error
        inside leaves a part of the micro-batch in it.

        Example::

            optimizer = headroom.optim.AdamW(model.parameters())
            handle = headroom.release_gradients(
                model, optimizer, accumulate_into_state=True
            )
            for micro_batch in torch.randn(4, 2, 3):
                with handle.micro_batch(share=1 / 4):
                    model(micro_batch).square().mean().backward()
            optimizer.step()

        Raises:
            RuntimeError: the release does not accumulate into the state, or a backward has had no
                step.
            ValueError: the share is not positive, or too large with those before it.
        """
        if not isinstance(self._strategy, IntoMoments):
            raise RuntimeError(f"micro_batch() needs {NEEDS}")
        with self._strategy.micro_batch(share), self._engine.dropping_on_error():
            yield

    def _finish(self, closure: Callable[[], Any] | None, max_grad_norm: float | None) -> bool:
        """Finishes the step that backward has begun, and returns whether it had begun one; if not,
        the step is an ordinary one. ``optimizer.step()`` calls it first."""
        if closure is not None:
            raise RuntimeError("step(closure) does not go with release_gradients()")
        self._strategy.check_finish(max_grad_norm)
        return self._engine.finish()


def _strategy(
    optimizer: Optimizer,
    scaler: GradScaler | None,
    clip: str | None,
    accumulator: GradAccumulator | None,
    into_state: bool,
) -> Strategy:
    """Returns the strategy that the options of :func:`release_gradients` ask for."""
    if clip not in tuple(CLIPS):
        raise ValueError(f"clip must be one of {tuple(CLIPS)}, got {clip!r}")
    if into_state:
        others = {"scaler": scaler, "clip": clip, "accumulator": accumulator}
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"{NEEDS} does not go with {name}=: a moment cannot be unscaled, clipped or "
                    "taken back; use an accumulator without it"
                )
        return IntoMoments(optimizer)
    if accumulator is not None:
        if clip is not None:
            raise ValueError("clip is for steps inside backward; with an accumulator, leave it out")
        return Accumulation(optimizer, accumulator)
    is_exact = scaler is not None or common_max_grad_norm(optimizer.param_groups) is not None
    if clip is None and is_exact and isinstance(optimizer._paging, Hosting):
        return Waiting(optimizer, scaler)
    return CLIPS[clip](optimizer, scaler)


def _check_model(model: nn.Module, optimizer: Optimizer, sums_over_ranks: bool) -> None:
    """Raises if the gradients of the model are not final when its parameters get them, or if the
    optimizer does not have all of its parameters."""
    refused = fsdp_class("FullyShardedDataParallel")
    if not sums_over_ranks:
        refused += (DistributedDataParallel,)
    for module in model.modules():
        if isinstance(module, refused):
            raise TypeError(
                f"release_gradients() does not work with {type(module).__name__}, which "
                "reduces gradients after the parameters have got them; use FSDP2's "
                "fully_shard, or for DDP an accumulator, GradAccumulator(ddp_model)"
            )
    if optimizer._release_handle is not None:
        raise ValueError("the optimizer has a handle of release_gradients() already")
    mine = {param for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param.requires_grad and param not in mine:
            raise ValueError(
                f"parameter '{name}' of the model requires grad, but the optimizer does not "
                "have it, and nothing would free its gradient"
            )


def _refuse_ddp(module: nn.Module, args: Any) -> None:
    """Refuses the forward of a model that was not wrapped when the release began."""
    if torch.compiler.is_compiling():
        return
    if DistributedDataParallel._get_active_ddp_module() is not None:
        raise RuntimeError(
            "a module whose gradients are released runs under DistributedDataParallel, which would "
            "reduce them after the step; use an accumulator, GradAccumulator(ddp_model)"
        )
