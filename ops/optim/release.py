"""Gradient release: parameters are stepped inside backward, and their gradients freed at once."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.parallel import DistributedDataParallel

from .._core.dtensor import local_part
from .._core.fsdp import fsdp_class
from ..functional.accumulate import accumulate_
from ..functional.unscale_norm import grad_norm
from ..grad.accumulate import GradAccumulator
from ..grad.norm import Measured, is_plain, measure
from .adam import Adam
from .base import Optimizer
from .master_weights import headroom_optimizer
from .plan import check_overlap, like_param
from .run import explained

__all__ = ["ReleaseHandle", "release_gradients"]

CLIPS = (None, "previous", "two-pass")
WHOLE = 1 - 1e-6  # shares that add up to one, rounded


def release_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: GradScaler | None = None,
    clip: str | None = None,
    accumulator: GradAccumulator | None = None,
    accumulate_into_state: bool = False,
    bucket_bytes: int = 1 << 22,
) -> ReleaseHandle:
    """Steps each parameter inside backward, as soon as its gradient is ready, and frees the
    gradient: of all gradients together about one parameter's is there at a time.

    The training loop stays as it is, ``optimizer.step()`` included, which finishes the step, and
    gives the same bits. Every backward needs a step after it, unless micro-batches are accumulated.
    It lasts until ``handle.remove()``, or as long as the optimizer is there.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-3)
        handle = headroom.optim.release_gradients(model, optimizer)
        for _ in range(3):
            model(torch.randn(4, 3)).square().mean().backward()  # steps, and frees
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()

    Args:
        model: the module whose parameters the optimizer has, all that require grad.
        optimizer: one of Headroom's, or accelerate's wrapper of it.
        scaler: the loop's :class:`headroom.amp.GradScaler` or :class:`torch.amp.GradScaler`.
            Gradients are unscaled by the step itself.
        clip: how to clip to the optimizer's ``max_grad_norm``, which needs the norm of all
            gradients before any is there. ``"previous"``: by the norm of the previous step (the
            first is not clipped). ``"two-pass"``: exactly, after a backward under
            :meth:`ReleaseHandle.measure`.
        accumulator: sums micro-batches. Each gradient goes into its sums as soon as it is ready;
            ``accumulator.finish()`` and ``optimizer.step()`` then do what they do without release,
            so that the scaler and clipping are exact. 4 bytes per parameter and one gradient.
        accumulate_into_state: the gradients of micro-batches go straight into the moments of Adam
            or AdamW, with no buffer at all; see :meth:`ReleaseHandle.micro_batch`.
        bucket_bytes: gradients wait until there are so many bytes of them, and are stepped
            together, which saves launches for small parameters. The bits do not depend on it.

    What it cannot do:

    - Skip a whole step. With a scaler, with ``clip="previous"`` and with AdamW8bit's
      ``nonfinite="skip_step"``, an infinite or NaN gradient skips its own parameter; those stepped
      before are stepped. The scaler's ``update()`` knows of it. Exact is the step after
      :meth:`ReleaseHandle.measure`, and that of an ``accumulator``. (Where a skip is possible, each
      parameter takes a launch of its own on CUDA.)
    - Show gradients: after backward they are gone. What reads or changes them between backward and
      step (``clip_grad_norm_``, ``scaler.unscale_``, logging) finds none.
    - Take a backward back, or step without one: ``zero_grad()`` before ``step()`` drops nothing,
      and ``step(closure)`` is refused.
    - Step a parameter that gets its gradient in several parts: two backwards before a step (use an
      ``accumulator``) and a parameter used in two reentrant checkpoints raise RuntimeError.
      ``create_graph=True`` does, too.
    - Step a parameter whose value the rest of backward still needs, such as one that is used
      detached, too: torch raises its RuntimeError about inplace operations.
    - Work under FSDP1, or under DistributedDataParallel without ``GradAccumulator(ddp_model)``:
      gradients are not final when the parameters get them. FSDP2 works; gradients are there one
      wrapped module at a time.
    - Free one by one the gradients of a compiled model, whose backward makes all those of a graph
      before it hands out the first.

    Raises:
        TypeError, ValueError: the model, the optimizer or the options do not fit.
    """
    return ReleaseHandle(
        model, optimizer, scaler, clip, accumulator, accumulate_into_state, bucket_bytes
    )


class ReleaseHandle:
    """What :func:`release_gradients` returns: :meth:`remove` ends it. A context manager, too."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        clip: str | None,
        accumulator: GradAccumulator | None,
        accumulate_into_state: bool,
        bucket_bytes: int,
    ) -> None:
        self._optimizer = headroom_optimizer(optimizer, "release_gradients")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip = clip
        self._accumulator = accumulator
        self._into_state = accumulate_into_state
        self._bucket_bytes = bucket_bytes
        self._check(model)

        self._places: dict[Tensor, int] = {}  # the group of each parameter
        self._hooked: set[Tensor] = set()
        self._hooks: list[Any] = []
        self._lock = threading.RLock()  # gradients of several devices come on several threads
        self._buckets: dict[Any, dict[Tensor, None]] = {}  # parameters that wait, by stream
        self._bytes: dict[Any, int] = {}  # of their gradients
        self._task = -1  # the backward at whose end the buckets will be emptied
        self._act: Callable[[list[Tensor]], None] = self._step  # what is done with gradients
        self._share: float | None = None  # of the micro-batch that runs
        self._norm: Tensor | None = None  # for clip="previous"
        self._restart()

        self._add_hooks()
        if not self._sums_over_ranks:
            self._hooks.append(model.register_forward_pre_hook(_refuse_ddp))
        self._optimizer._release = self

    def _check(self, model: nn.Module) -> None:
        optimizer = self._optimizer
        refused = fsdp_class("FullyShardedDataParallel")
        if not self._sums_over_ranks:
            refused += (DistributedDataParallel,)
        for module in model.modules():
            if isinstance(module, refused):
                raise TypeError(
                    f"release_gradients() does not work with {type(module).__name__}, which "
                    "reduces gradients after the parameters have got them; use FSDP2's "
                    "fully_shard, or for DDP an accumulator, GradAccumulator(ddp_model)"
                )
        if optimizer._release is not None:
            raise ValueError("the optimizer has a handle of release_gradients() already")
        mine = {param for group in optimizer.param_groups for param in group["params"]}
        for name, param in model.named_parameters():
            if param.requires_grad and param not in mine:
                raise ValueError(
                    f"parameter '{name}' of the model requires grad, but the optimizer does not "
                    "have it, and nothing would free its gradient"
                )
        if self._clip not in CLIPS:
            raise ValueError(f"clip must be one of {CLIPS}, got {self._clip!r}")
        self._check_clip()
        if self._accumulator is not None and self._clip is not None:
            raise ValueError("clip is for steps inside backward; with an accumulator, leave it")
        if not self._bucket_bytes >= 0:
            raise ValueError(f"bucket_bytes must be >= 0, got {self._bucket_bytes}")
        if self._accumulator is not None:
            missing = {p for p in mine if p.requires_grad} - set(self._accumulator._params)
            if missing:
                raise ValueError(
                    f"the accumulator does not have {optimizer._name_of(missing.pop())}"
                )
        if self._into_state:
            self._check_states()
        # A step of a part does not look beyond it.
        check_overlap(optimizer, [p for group in optimizer.param_groups for p in group["params"]])

    def _check_clip(self) -> None:
        """Whether the optimizer's ``max_grad_norm``, which may change, is what clip is for."""
        if self._clip is not None and self._max_norm is None:
            raise ValueError(f"clip={self._clip!r} needs an optimizer with max_grad_norm")
        if self._clip is None and self._accumulator is None and self._max_norm is not None:
            raise ValueError(
                "the optimizer has max_grad_norm: say clip='previous' or clip='two-pass', or give "
                "an accumulator"
            )

    def _check_states(self) -> None:
        optimizer, wanted = self._optimizer, "accumulate_into_state=True"
        for name in ("_scaler", "_clip", "_accumulator"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{wanted} does not go with {name[1:]}=: a moment cannot be unscaled, clipped "
                    "or taken back; use an accumulator without it"
                )
        if not isinstance(optimizer, Adam):
            raise TypeError(f"{wanted} wants Adam or AdamW, got {optimizer._class_name}")
        if optimizer.defaults.get("nonfinite", "propagate") != "propagate":
            raise ValueError(
                f"{wanted} needs nonfinite='propagate': what a moment has cannot be taken back"
            )
        for group in optimizer.param_groups:
            if 0.0 in map(float, group["betas"]):
                raise ValueError(f"{wanted} needs betas above 0, got {group['betas']}")
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                raise ValueError(f"{wanted} needs decoupled weight decay, AdamW's")
            for param in group["params"]:
                for part in ("exp_avg", "exp_avg_sq"):
                    dtype = self._dtype_of(part, param, group)
                    if dtype != torch.float32:
                        raise ValueError(
                            f"{wanted} needs float32 moments, in which a micro-batch is not "
                            f"rounded away, but those of {optimizer._name_of(param)} are {dtype}; "
                            "use an accumulator"
                        )

    def _dtype_of(self, part: str, param: Tensor, group: dict[str, Any]) -> torch.dtype:
        optimizer = self._optimizer
        if part in optimizer.state.get(param, ()):
            return optimizer.state[param][part].dtype
        like = torch.empty_like(local_part(param), device="meta")
        return optimizer._layout(param, group).slot(part).new(like).dtype

    @property
    def _sums_over_ranks(self) -> bool:
        """Whether gradients are those of this rank alone, for the accumulator to reduce."""
        return self._accumulator is not None and self._accumulator.sums_over_ranks

    @property
    def _max_norm(self) -> float | None:
        return self._optimizer._max_grad_norm

    # ---- life -----------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether gradients are released: until :meth:`remove`."""
        return bool(self._hooks)

    def remove(self) -> None:
        """Ends the release: the optimizer works as it did before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._optimizer._release is self:
            self._optimizer._release = None

    def __enter__(self) -> ReleaseHandle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """What ``clip="previous"`` needs to resume with the same bits: the norm of that step."""
        return {"norm": self._norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned."""
        self._norm = state_dict["norm"]

    def _add_hooks(self) -> None:
        # Weak: torch's hooks on parameters are out of the garbage collector's sight, and would keep
        # the optimizer, and with it the parameters, for good. The optimizer keeps the handle.
        method = weakref.WeakMethod(self._ready)

        def ready(param: Tensor) -> None:
            if (call := method()) is not None:
                call(param)

        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and param not in self._hooked:
                    self._hooks.append(param.register_post_accumulate_grad_hook(ready))
                    self._hooked.add(param)
                self._places[param] = index

    def _restart(self) -> None:
        """Before the first gradient of a step."""
        self._seen: set[Tensor] = set()  # parameters that this backward has got to
        self._norms: list[tuple[list[Tensor], Tensor]] = []
        self._verdict: Measured | None = None  # of measure()
        self._flag: Tensor | None = None  # the scaler's
        self._shares = 0.0  # of the micro-batches that the moments have
        self._folded: set[Tensor] = set()

    # ---- in backward ----------------------------------------------------------------------------

    def _ready(self, param: Tensor) -> None:
        """The hook: a parameter has its gradient."""
        if param.grad is None:
            return
        if param.grad.requires_grad:
            raise RuntimeError(
                "release_gradients() frees gradients, but create_graph=True wants to differentiate "
                "them; remove() the handle before"
            )
        with self._lock:
            if self._accumulator is None:
                if self._act == self._step:
                    self._check_step()
                self._tell_scaler()
                self._check_unseen(param)
                self._seen.add(param)
            elif not self._accumulator.is_open:
                raise RuntimeError("backward() outside the micro_batch() of the accumulator")
            self._wait(param)

    def _check_step(self) -> None:
        if not self._seen:
            self._check_clip()
        if self._clip == "two-pass" and self._verdict is None:
            raise RuntimeError("clip='two-pass' needs a backward under measure() before this one")
        if self._shares and self._share is None:
            raise RuntimeError("backward() outside micro_batch(), after one")

    def _tell_scaler(self) -> None:
        # As if unscale_() had been called: step() then neither unscales nor looks for gradients.
        if self._scaler is None:
            return
        optimizer_state = self._scaler._per_optimizer_states[id(self._optimizer)]
        flags = optimizer_state["found_inf_per_device"]
        if optimizer_state["stage"] is OptState.STEPPED:
            raise RuntimeError("update() has not been called since the last step()")
        if self._flag is not None and any(flag is self._flag for flag in flags.values()):
            return
        self._restart()  # torch's scaler does not call a step() that it skips
        scale, _ = self._scaler._check_scale_growth_tracker("step")
        self._flag = torch.zeros((), dtype=torch.float32, device=scale.device)
        optimizer_state["stage"] = OptState.UNSCALED
        optimizer_state["found_inf_per_device"] = {scale.device: self._flag}

    def _check_unseen(self, param: Tensor | None = None) -> None:
        if param not in self._seen if param is not None else not self._seen:
            return
        name = self._optimizer._name_of(next(iter(self._seen)) if param is None else param)
        what = "has got a gradient since the last optimizer.step()"
        if param is not None:
            waits = any(param in bucket for bucket in self._buckets.values())
            first = "waits to be stepped" if waits else "has been stepped, and is gone"
            if not waits:  # else step() would step the second by itself
                param.grad = None
            what = f"got a second gradient before optimizer.step(): the first {first}"
        raise RuntimeError(
            f"{name} {what}. Call step() after every backward(), sum micro-batches in a "
            "GradAccumulator, and do not use a parameter in several reentrant checkpoints"
        )

    def _wait(self, param: Tensor) -> None:
        """Puts a parameter into a bucket, and empties the bucket if it is full."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            torch.autograd.Variable._execution_engine.queue_callback(self._flush_all)
            self._task = task
        grad = local_part(param.grad)
        stream = torch.cuda.current_stream(grad.device) if grad.is_cuda else None
        self._buckets.setdefault(stream, {})[param] = None
        size = param.grad.numel() * grad.element_size()  # of all shards: ranks flush together
        self._bytes[stream] = self._bytes.get(stream, 0) + size
        if self._bytes[stream] >= self._bucket_bytes or task == -1:
            self._flush(stream)

    def _flush_all(self) -> None:
        with self._lock:
            self._task = -1
            for stream in list(self._buckets):
                if stream is None:
                    self._flush(stream)
                    continue
                with torch.cuda.stream(stream):
                    self._flush(stream)
                torch.cuda.current_stream(stream.device).wait_stream(stream)

    @torch.no_grad()
    def _flush(self, stream: Any) -> None:
        self._bytes[stream] = 0
        params = [param for param in self._buckets.pop(stream, ()) if param.grad is not None]
        if not params:
            return
        if self._accumulator is not None:
            self._accumulator.take(params)
            return
        self._act(params)
        for param in params:
            param.grad = None

    def _drop(self) -> None:
        """Forgets what waits, after an error."""
        for bucket in self._buckets.values():
            for param in bucket:
                param.grad = None
        self._buckets, self._bytes, self._seen = {}, {}, set()

    def _step(self, params: list[Tensor]) -> None:
        optimizer, scale = self._optimizer, self._scale
        flags = found_inf = coef = None
        if self._verdict is not None:
            found_inf = self._verdict.found_inf
            coef = None if self._max_norm is None else self._verdict.clip_coef
        elif self._scaler is not None or self._clip is not None or optimizer._skips_steps:
            norms = self._measured(params)
            flags = (~norms.isfinite()).float()
            if self._flag is not None:
                self._flag.copy_(torch.maximum(self._flag, flags.amax().to(self._flag.device)))
            if self._clip is not None and self._norm is not None:
                coef = (self._max_norm / (self._norm + 1e-6)).clamp(max=1.0)
        if self._share is not None and self._share < 1.0:
            coef = torch.full((), self._share, dtype=torch.float32, device=params[0].device)
        if flags is None or (flags.device.type == "cpu" and not flags.any()):
            self._apply(params, scale, found_inf, coef)
        else:
            for param, flag in zip(params, flags):
                self._apply([param], scale, flag, coef)

    def _apply(
        self,
        params: list[Tensor],
        scale: Tensor | None,
        found_inf: Tensor | None,
        coef: Tensor | None,
    ) -> None:
        optimizer = self._optimizer
        scalars = optimizer._scalars.joined(found_inf, coef)
        if scale is not None:
            scalars = scalars._replace(grad_scale=scale)
        by_group: dict[int, list[Tensor]] = {}
        for param in params:
            by_group.setdefault(self._places[param], []).append(param)
        for index, members in by_group.items():
            optimizer.step_part(index, members, scalars)

    @property
    def _scale(self) -> Tensor | None:
        """What gradients are to be divided by."""
        return self._optimizer.grad_scale if self._scaler is None else self._scaler._scale

    def _measure(self, params: list[Tensor]) -> None:
        self._measured(params)

    def _measured(self, params: list[Tensor]) -> Tensor:
        """The norm of each gradient, of all its shards, infinite or NaN if an element is."""
        grads, scale = [like_param(param.grad, param) for param in params], self._scale
        try:
            if is_plain(grads):
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
        self._norms.append((params, norms))
        return norms

    def _total(self) -> Measured:
        """What the norms of all gradients say together."""
        if not self._norms:
            return measure([])
        home = self._norms[0][1].device
        norms = torch.cat([part.to(home) for _, part in self._norms]).double()
        norm, flags = torch.linalg.vector_norm(norms), ~norms.isfinite()
        limit = math.inf if self._max_norm is None else self._max_norm
        clip = (limit / (norm + 1e-6)).clamp(max=1.0)
        culprit = torch.where(flags.any(), flags.float().argmax(), -1)
        where = range(len(norms))
        return Measured(norm.float(), flags.any().float(), clip.float(), [(where, culprit)])

    # ---- around backward ------------------------------------------------------------------------

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """A backward in here only measures the gradients, and frees them. The next backward, on the
        same loss, steps with what was found: clipped by the norm of all gradients if the optimizer
        has ``max_grad_norm``, and skipped altogether if one was not finite and a scaler, clipping
        or ``nonfinite="skip_step"`` asks for that.

        Either ``backward(retain_graph=True)`` in here, and ``backward()`` behind, or compute the
        loss twice: the state of torch's random numbers is put back at the end, so that dropout
        drops the same. What else a forward changes (BatchNorm's averages) it changes twice.

        Example::

            optimizer = headroom.optim.AdamW(model.parameters(), max_grad_norm=1.0)
            handle = headroom.optim.release_gradients(model, optimizer, clip="two-pass")
            x = torch.randn(4, 3)
            with handle.measure():
                model(x).square().mean().backward()
            model(x).square().mean().backward()
            optimizer.step()
        """
        if self._accumulator is not None or self._into_state:
            raise RuntimeError("measure() does not go with the accumulation of micro-batches")
        if self._scaler is not None and self._scaler._scale is not None:  # else there was no step
            self._tell_scaler()
        self._check_unseen()
        self._norms = []
        devices = {param.device for param in self._places if param.is_cuda}
        self._act = self._measure
        try:
            with torch.random.fork_rng(sorted(d.index for d in devices), enabled=True):
                yield
            self._flush_all()
        except BaseException:
            self._drop()
            raise
        finally:
            self._act = self._step
        self._verdict = verdict = self._total()
        self._seen = set()
        self._optimizer.grad_norm = verdict.norm
        skips = self._scaler is not None or self._max_norm is not None
        if not (skips or self._optimizer._skips_steps):
            verdict.found_inf = torch.zeros_like(verdict.found_inf)
        if self._flag is not None:
            self._flag.copy_(verdict.found_inf)

    @contextlib.contextmanager
    def micro_batch(self, share: float) -> Iterator[None]:
        """A backward in here is one of several micro-batches, and its loss a mean over ``share`` of
        the samples of all: 1/4, if there are four alike. Where the shares have come to 1, the
        parameters are stepped. Needs ``accumulate_into_state=True``.

        The first moment becomes that of a step with the mean gradient ``G = sum(share * grad)``,
        exactly but for rounding. The second takes the squares of the parts instead of that of their
        sum, ``exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * sum((share * grad) ** 2)``, AdamA's
        rule (Zhang et al., arXiv:2305.19982): as much for gradients that are all noise, and n times
        less for n equal ones. The square of the sum needs the sum, and it cannot be had from the
        moments: the step needs ``beta1 * m + (1 - beta1) * G``, ``beta2 * v + (1 - beta2) * G**2``
        and, to add another micro-batch to the square, ``G``: three numbers for an element, and the
        state has two. An ``accumulator`` is that third one.

        Between micro-batches the optimizer's state is half a step, not to be saved; and an error in
        here leaves a part of the micro-batch in it.

        Example::

            optimizer = headroom.optim.AdamW(model.parameters())
            handle = headroom.optim.release_gradients(
                model, optimizer, accumulate_into_state=True
            )
            for micro_batch in torch.randn(4, 2, 3):
                with handle.micro_batch(share=1 / 4):
                    model(micro_batch).square().mean().backward()
            optimizer.step()
        """
        if not self._into_state:
            raise RuntimeError("micro_batch() needs accumulate_into_state=True")
        if not 0 < share <= 2 - WHOLE - self._shares:
            raise ValueError(f"got a share of {share}, after shares of {self._shares} together")
        self._check_unseen()
        is_last = self._shares + share >= WHOLE
        self._share = share
        self._act = self._step if is_last else self._fold
        try:
            yield
        except BaseException:
            self._drop()
            raise
        finally:
            self._act, self._share = self._step, None
        self._shares += share
        if not is_last:
            self._folded |= self._seen
            self._seen = set()

    def _fold(self, params: list[Tensor]) -> None:
        """Adds gradients to the moments so that the step with the last micro-batch, which scales
        them by beta, leaves of each what it would of that one."""
        optimizer = self._optimizer
        for param in params:
            group = optimizer.param_groups[self._places[param]]
            entry = optimizer._entry(param, group)
            beta1, beta2 = map(float, group["betas"])
            share = -self._share if group["maximize"] else self._share
            grad = local_part(like_param(param.grad, param))
            accumulate_([local_part(entry["exp_avg"])], [grad], factor=share * (1 - beta1) / beta1)
            grad = grad.float()
            value = share * share * (1 - beta2) / beta2
            local_part(entry["exp_avg_sq"]).addcmul_(grad, grad, value=value)

    # ---- at the step ----------------------------------------------------------------------------

    def finish(self, closure: Callable[[], Any] | None, max_grad_norm: float | None) -> bool:
        """What ``optimizer.step()`` does first: finishes the step that backward began, and says
        whether there was one. Else the step is an ordinary one."""
        if closure is not None:
            raise RuntimeError("step(closure) does not go with release_gradients()")
        if 0 < self._shares < WHOLE:
            raise RuntimeError(f"step() after micro-batches with shares of {self._shares} together")
        self._add_hooks()  # of parameters that are new, or require grad since
        if not (self._seen or self._folded):
            self._shares = 0.0
            return False
        if max_grad_norm is not None and max_grad_norm != self._max_norm:
            raise RuntimeError(
                "the step was made in backward: give max_grad_norm to the optimizer's constructor"
            )
        with torch.no_grad():
            for param in self._folded - self._seen:
                param.grad = torch.zeros_like(param)
            self._buckets, self._bytes = {}, {}
            left = [param for param in self._places if param.grad is not None]
            if left:
                self._step(left)
            for param in left:
                param.grad = None
            self._conclude()
        self._restart()
        return True

    def _conclude(self) -> None:
        optimizer, measured = self._optimizer, self._verdict
        if measured is None and self._norms:
            measured = self._total()
            optimizer.grad_norm = norm = measured.norm
            if self._clip is not None:
                before = torch.zeros_like(norm) if self._norm is None else self._norm
                self._norm = torch.where(norm.isfinite(), norm, before.to(norm.device))
        optimizer.measured = measured
        optimizer.measured_params = [param for params, _ in self._norms for param in params]
        if measured is not None:
            optimizer._count_step(measured.found_inf)


def _refuse_ddp(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if DistributedDataParallel._get_active_ddp_module() is not None:
        raise RuntimeError(
            "a module whose gradients are released runs under DistributedDataParallel, which would "
            "reduce them after the step; use an accumulator, GradAccumulator(ddp_model)"
        )
