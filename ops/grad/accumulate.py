"""Sums gradients over micro-batches in float32, or in float64 where they are."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from .._core.dtensor import local_part
from .._core.grouping import by_device, grouped
from .._core.ownership import Ownership
from ..functional.accumulate import accumulate_
from ..functional.unscale_norm import unscale_norm_
from ..host.arena import HostArena, default_arena
from .on_host import HostSums
from .ranks import Ranks, checksum

BUCKET = 32 << 20  # bytes that one reduction over the ranks carries


class GradAccumulator:
    """Sums the gradients of micro-batches in float32, and returns their mean in ``param.grad``.

    Each micro-batch leaves ``param.grad`` empty, so that gradients in low precision are never added
    to each other. After :meth:`finish` it holds the float32 mean, which Headroom's optimizers take
    for parameters of any dtype. Float64 gradients are summed in float64; sparse and complex ones
    are refused.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters())
        accumulator = headroom.GradAccumulator(model)
        for tokens in (5, 3):  # micro-batches
            with accumulator.micro_batch(weight=tokens):
                model(torch.randn(tokens, 3)).square().mean().backward()  # a mean over the tokens
        accumulator.finish()
        optimizer.step()

    Where a ``with`` does not fit, call ``accumulator.add(weight=tokens)`` after each backward, and
    ``optimizer.zero_grad()`` after the step as usual.

    Args:
        source: a module, an optimizer, or an iterable of parameters. A module or an optimizer is
            asked for its parameters at each micro-batch, so that layers may be unfrozen or added
            later (added before the accumulator under FSDP2). On several ranks, give the module.
        compensated: keep the rounding error of each addition (Kahan): 4 more bytes per parameter.
        host: True, or a :class:`headroom.HostArena`, keeps the sums there between micro-batches.
            The device adds to them while they pass through it, which copies 8 bytes per parameter
            for each micro-batch, and has the same bits. :meth:`finish` brings them back.
        process_group: the ranks over which :meth:`finish` adds up gradients that nothing else
            reduces; ``"local"`` if each rank trains for itself. None finds DDP and FSDP2.

    **On several ranks** the mean is over the tokens of all ranks, whatever the weight of each:

    - :class:`~torch.nn.parallel.DistributedDataParallel` runs micro-batches under ``no_sync()``,
      and :meth:`finish` adds up the sums of the ranks. The source is the DDP module, or the module
      in it, which may be wrapped later.
    - FSDP2 averages the gradients of each backward over the ranks, so :meth:`micro_batch`
      multiplies them before that, each rank by its weight over the largest of the first
      micro-batch; where the factor is not 1, 16-bit gradients are rounded once more. Make the
      accumulator after ``fully_shard(model)``, and give it the module. With
      ``set_gradient_divide_factor`` the mean is divided as FSDP2 was told.
    - Where gradients have been averaged before the weight was known (:meth:`add` after a backward
      that reduces, FSDP2 with an optimizer as the source, FSDP1), the weights must be the same on
      all ranks, and :meth:`finish` raises if they are not.
    - If several ranks run and none of these is found, the first micro-batch raises.

    Memory: 4 bytes per parameter for the sums, from the first micro-batch (with ``host``, from
    :meth:`finish`) until the gradients that :meth:`finish` made of them are dropped, and the
    gradients themselves between a backward and the end of its ``with``.

    A 16-bit parameter refuses a float32 gradient unless its ``grad_dtype`` is None. The constructor
    sets it, permanently. In a torch without ``grad_dtype`` the mean is rounded to the parameter's
    dtype, once.

    :meth:`state_dict` and :meth:`load_state_dict` carry the sums over a restart in the middle of a
    step; after :meth:`finish` the sums are empty.
    """

    def __init__(
        self,
        source: nn.Module | torch.optim.Optimizer | Iterable[Tensor],
        *,
        compensated: bool = False,
        process_group: torch.distributed.ProcessGroup | str | None = None,
        host: HostArena | bool = False,
    ) -> None:
        if not isinstance(host, (bool, HostArena)):
            raise TypeError(f"host is {type(host).__name__}, wanted a bool or a headroom.HostArena")
        if not isinstance(source, (nn.Module, torch.optim.Optimizer)):
            source = [source] if isinstance(source, Tensor) else [*source]
        self._source = source
        self._find_params()
        if not any(param.requires_grad for param in self._params):
            raise ValueError("GradAccumulator got no parameters that require grad")
        module = source if isinstance(source, nn.Module) else None
        self._ranks = Ranks(module, self._params, process_group)
        self._sums: dict[Tensor, Tensor] = {}
        self._compensations: dict[Tensor, Tensor] = {}
        self._compensated = compensated
        self._host: HostSums | None = None
        if host is not False:
            self._host = HostSums(default_arena() if host is True else host)
        self._weight = 0.0
        self._has_any = False  # micro-batches, which may all be of weight 0
        # Weights of micro-batches whose gradients were averaged over the ranks before them.
        self._late: list[float] = []
        self._open: float | None = None  # weight of the running micro-batch, or None
        self._unit: float | None = None  # the weight that FSDP2's gradients are multiples of
        self._is_partial = False  # whether the sums hold a part of it already
        self._given: dict[Tensor, weakref.ref[Tensor]] = {}  # gradients that the last finish() set

    def _find_params(self) -> None:
        """Asks the source for its parameters."""
        if isinstance(self._source, nn.Module):
            params = self._source.parameters()
        elif isinstance(self._source, torch.optim.Optimizer):
            params = (p for group in self._source.param_groups for p in group["params"])
        else:
            params = iter(self._source)
        # Frozen ones too, which may be unfrozen later.
        self._params: list[Tensor] = list(dict.fromkeys(params))
        for param in self._params:
            if not _takes_sum(param) and hasattr(param, "grad_dtype"):
                param.grad_dtype = None

    @contextlib.contextmanager
    def micro_batch(self, weight: float = 1.0) -> Iterator[None]:
        """Encloses the forward and backward pass of one micro-batch. Drops existing gradients at
        its start, and adds the new ones at its end; those of a micro-batch of weight 0, one without
        labels say, are dropped. An error inside drops the micro-batch, or, with
        :func:`~headroom.release_gradients`, which may have added a part of it already, all
        micro-batches since the last :meth:`finish`."""
        weight = _checked_weight(weight)
        weighting = self._ranks.weighting
        if weighting is None:  # else modules may hold whole parameters now, which FSDP2 made
            self._find_params()
        self._empty()
        if weighting is not None:
            self._unit = self._unit or self._ranks.largest(weight)
            weighting.factor = weight / self._unit if weight else 0.0
        self._open = weight
        try:
            with self._ranks.micro_batch():
                yield
            with torch.no_grad():
                self._take(self._params, weight)
        except BaseException:
            self._empty()
            if self._is_partial:
                self._clear()
            raise
        finally:
            self._open = None
            self._is_partial = False
            if weighting is not None:
                weighting.factor = 1.0
        self._count(weight, late=self._ranks.averages and weighting is None)

    @torch.no_grad()
    def add(self, weight: float = 1.0) -> None:
        """Adds the gradients of a micro-batch, whose loss is a mean over ``weight`` tokens (or
        samples, if the loss of the whole batch is a mean over samples), and clears ``param.grad``.

        Raises:
            TypeError, ValueError: the weight is not a finite number >= 0.
            RuntimeError: ``param.grad`` is still the tensor that :meth:`finish` set, because
                ``zero_grad()`` was not called after the step, or with ``set_to_none=False``. Or
                several ranks train, and nothing says how their gradients are reduced.
        """
        weight = _checked_weight(weight)
        self._ranks.check_known()
        if self._ranks.weighting is None:
            self._find_params()
        self._take(self._params, weight)
        self._count(weight, late=self._ranks.averages or self._ranks.averaged_by_ddp)

    def _count(self, weight: float, late: bool) -> None:
        self._weight += weight
        self._has_any = True
        if late:
            self._late.append(weight)

    @property
    def is_open(self) -> bool:
        """Returns whether a micro-batch is running."""
        return self._open is not None

    @property
    def sums_over_ranks(self) -> bool:
        """Returns whether backward leaves gradients to this rank, for :meth:`finish` to add up."""
        return self._ranks.sums

    @torch.no_grad()
    def _take_early(self, params: Iterable[Tensor]) -> None:
        """Adds some gradients of the running micro-batch to the sums before it ends."""
        assert self._open is not None
        self._is_partial = True
        self._take(params, self._open)

    def _take(self, params: Iterable[Tensor], weight: float) -> None:
        weighting = self._ranks.weighting if self.is_open else None
        factors: dict[Tensor, float] = {}
        for param in params:
            if param.grad is None:
                continue
            _check_grad(param)
            if param in self._given and self._given[param]() is param.grad:
                raise RuntimeError(
                    "a gradient is still the tensor of the mean that finish() gave; call "
                    "zero_grad() after the step with set_to_none=True, its default (one that is "
                    "zeroed in place cannot be told from one that is not), or use micro_batch()"
                )
            factor = weight
            if weighting is not None and isinstance(param, DTensor):
                if weighting.factor != 1.0 and param not in weighting.weighted:
                    raise RuntimeError(
                        "FSDP2 has averaged a gradient before it had this rank's weight, since "
                        "its module's forward ran without hooks (compiled before the accumulator "
                        "was made, or called by another name); give all ranks the same weight, or "
                        "make the accumulator before the first forward"
                    )
                weighting.weighted.discard(param)
                factor = self._unit  # the rest of the weight is in the gradient
            if factor:
                factors[param] = factor
            else:  # not added, because a mean over nothing is not a number
                param.grad = None
        calls = grouped(factors, lambda p: (p.grad.device, _sum_dtype(p.grad), factors[p]))
        for (_, dtype, factor), params in calls.items():
            if self._host is not None:
                self._add_on_host(self._host, params, dtype, factor)
                continue
            for param in params:
                if param not in self._sums:
                    self._sums[param] = torch.zeros_like(param.grad, dtype=dtype)
                    if self._compensated:
                        self._compensations[param] = torch.zeros_like(self._sums[param])
            sums = [local_part(self._sums[p]) for p in params]
            grads = [local_part(p.grad) for p in params]
            if dtype == torch.float64:
                torch._foreach_add_(sums, grads, alpha=factor)
            else:
                kept = params if self._compensated else ()
                compensations = [local_part(self._compensations[p]) for p in kept]
                accumulate_(sums, grads, compensations=compensations, factor=factor)
            for param in params:
                param.grad = None

    def _add_on_host(
        self, host: HostSums, params: list[Tensor], dtype: torch.dtype, factor: float
    ) -> None:
        host.house(params, [param.grad for param in params], dtype, self._compensated)
        try:
            host.add(params, factor)
        except BaseException:
            self._clear()  # a part may have been added
            raise
        self._note_on_host(host, params)
        for param in params:
            param.grad = None

    def _note_on_host(self, host: HostSums, params: Iterable[Tensor]) -> None:
        for param in params:
            for tensors, tensor in zip((self._sums, self._compensations), host.tensors(param)):
                tensors[param] = tensor

    @torch.no_grad()
    def finish(self) -> None:
        """Sets ``param.grad`` to the mean over all micro-batches since the last call.

        A parameter without a gradient in all of them (on all ranks, under DDP) gets none. If all
        weights are 0, no parameter gets one.
        """
        if not self._has_any:
            raise RuntimeError("finish() without a micro-batch since the last one")
        ranks = self._ranks
        weight, late = self._weight, 0.0
        if ranks.groups:
            used = [float(param in self._sums) for param in self._params]
            weight, late, *used = ranks.reduced([weight, len(self._late), *used])
        if late and not ranks.agree(checksum(self._late)):
            raise RuntimeError(
                "the weights of micro-batches differ between ranks, but their gradients had been "
                "averaged over the ranks before the accumulator knew the weights. Give it the "
                "module, GradAccumulator(model), and run forward and backward in "
                "micro_batch(weight)"
            )
        if self._host is not None:
            self._sums = {param: self._host.brought(param) for param in self._sums}
        if ranks.sums:
            self._reduce(used)
        if ranks.averages:
            weight /= ranks.size

        def divisor(param: Tensor) -> float:
            # FSDP2 does not reduce parameters that it was told to ignore: their sums are this
            # rank's.
            own = ranks.averages and ranks.weighting is not None and not isinstance(param, DTensor)
            return self._weight if own else weight

        sums = self._sums
        calls = grouped(sums, lambda p: (sums[p].device, sums[p].dtype, divisor(p)))
        for (device, dtype, total), params in calls.items():
            means = [local_part(sums[p]) for p in params]
            if dtype == torch.float64:
                torch._foreach_div_(means, total)
                continue
            scale = torch.full((), total, dtype=torch.float32, device=device)
            unscale_norm_(means, grad_scale=scale)
        for param, mean in sums.items():
            param.grad = mean if _takes_sum(param) else mean.to(param.dtype)
            self._given[param] = weakref.ref(param.grad)
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the last :meth:`finish`, on this rank. A run that loads them and
        the optimizer's state between two micro-batches continues with the same bits. The tensors
        are the accumulator's own, not copies, as with optimizers; those on the host are copied.

        Raises:
            RuntimeError: a micro-batch is running.
        """
        self._check_closed("state_dict()")
        found = {"sums": self._sums, "compensations": self._compensations}
        if self._host is not None:
            self._host.wait()
            found = {
                name: {param: tensor.clone() for param, tensor in tensors.items()}
                for name, tensors in found.items()
            }
        return {
            "weight": self._weight,
            "has_any": self._has_any,
            "late": list(self._late),
            "compensated": self._compensated,
            **{name: [own.get(param) for param in self._params] for name, own in found.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned for the same parameters in the same order, on any
        device. Replaces the sums of this accumulator by copies, unless they are its own.

        Raises:
            RuntimeError: a micro-batch is running.
            ValueError: the sums do not fit. Nothing has been changed then.
        """
        self._check_closed("load_state_dict()")
        if state_dict["compensated"] != self._compensated:
            raise ValueError(
                f"the sums were made with compensated={state_dict['compensated']}, but this "
                f"accumulator has compensated={self._compensated}"
            )
        weight = float(state_dict["weight"])
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight must be a finite number >= 0, got {weight}")
        if "losts" in state_dict:  # Headroom before 0.2.0
            state_dict = state_dict | {"compensations": state_dict["losts"]}
        loaded = {name: self._fitted(name, state_dict[name]) for name in ("sums", "compensations")}
        if self._compensated and loaded["sums"].keys() != loaded["compensations"].keys():
            raise ValueError("compensations and sums are not of the same parameters")
        if self._host is None:
            before = self._sums, self._compensations
            self._sums, self._compensations = loaded["sums"], loaded["compensations"]
            ownership = Ownership([state_dict["sums"], state_dict["compensations"]], before)
            for tensors, replaced in zip((self._sums, self._compensations), before):
                for param, tensor in tensors.items():
                    tensors[param] = ownership.owned(tensor)
                    replaced.pop(param, None)
        else:
            self._load_on_host(self._host, *loaded.values())
        self._weight = weight
        self._late = [float(weight) for weight in state_dict.get("late", ())]
        self._has_any = bool(weight or state_dict.get("has_any"))

    def _load_on_host(
        self, host: HostSums, sums: dict[Tensor, Tensor], compensations: dict[Tensor, Tensor]
    ) -> None:
        for (_, dtype), params in grouped(sums, lambda p: (p.device, sums[p].dtype)).items():
            host.house(params, [sums[param] for param in params], dtype, self._compensated)
        self._clear()
        for param, value in sums.items():
            host.put(param, [value, *([compensations[param]] if self._compensated else ())])
        self._note_on_host(host, sums)

    def _fitted(self, name: str, tensors: Sequence[Tensor | None]) -> dict[Tensor, Tensor]:
        """Returns loaded tensors by parameter, on its device; raises if one does not fit."""
        params = self._params
        if len(tensors) < len(params):  # Headroom before 0.2.0 left frozen parameters out
            params = [param for param in params if param.requires_grad]
        if len(tensors) != len(params):
            raise ValueError(
                f"{name} is of {len(tensors)} parameters, but the accumulator has {len(params)}"
            )
        fitted = {}
        for k, (tensor, param) in enumerate(zip(tensors, params)):
            if tensor is None:
                continue
            dtype = _sum_dtype(param)
            if tensor.shape != param.shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{name}[{k}] is {tensor.dtype} of shape {tuple(tensor.shape)}, wanted "
                    f"{str(dtype).removeprefix('torch.')} of shape {tuple(param.shape)}"
                )
            fitted[param] = tensor.detach().to(param.device)
        return fitted

    def _check_closed(self, what: str) -> None:
        if self.is_open:
            raise RuntimeError(f"{what} inside micro_batch()")

    def _clear(self) -> None:
        self._sums, self._compensations, self._weight, self._late = {}, {}, 0.0, []
        self._has_any = False
        if self._host is not None:
            self._host.clear()

    def _empty(self) -> None:
        for param in self._params:
            param.grad = None

    def _reduce(self, used: Sequence[float]) -> None:
        """Adds up the sums of all ranks. ``used``: how many ranks have a sum of each parameter."""
        for param, count in zip(self._params, used):
            if count and param not in self._sums:
                self._sums[param] = torch.zeros_like(param, dtype=_sum_dtype(param))
        # The same order on every rank, whichever of its parameters had gradients first.
        self._sums = {param: self._sums[param] for param in self._params if param in self._sums}
        (group,) = self._ranks.groups
        for sums in by_device(map(local_part, self._sums.values())).values():
            for totals in _take_tensors(sums, BUCKET):
                flat = _flatten_dense_tensors(totals)
                torch.distributed.all_reduce(flat, group=group)
                for total, part in zip(totals, _unflatten_dense_tensors(flat, totals)):
                    total.copy_(part)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _takes_sum(param: Tensor) -> bool:
    return getattr(param, "grad_dtype", param.dtype) in (_sum_dtype(param), None)


def _check_grad(param: Tensor) -> None:
    if param.grad.layout != torch.strided:
        kind, advice = "sparse", "give the Embedding sparse=False"
    elif not param.grad.is_floating_point():
        kind, advice = f"{param.grad.dtype}", "view the parameter as real numbers"
    else:
        return
    raise TypeError(
        f"a parameter of shape {tuple(param.shape)} has a {kind} gradient, which GradAccumulator "
        f"does not add; {advice}, or leave the parameter out"
    )


def _checked_weight(weight: float | Tensor) -> float:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if not isinstance(weight, Real):
        raise TypeError(f"weight must be a number, got {type(weight).__name__}")
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be a finite number >= 0, got {weight}")
    return float(weight)
