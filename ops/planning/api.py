"""``headroom.plan``, ``headroom.fits`` and ``headroom.max_batch``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._core.sizes import parse_bytes
from ..step.description import Step
from ..step.micro_batches import resized
from .advice import advise
from .checks import check_step
from .device import device_share
from .products import planned_for
from .recorder import Recorder
from .result import Plan
from .sharding import DDP, FSDP
from .trace import trace

__all__ = ["fits", "max_batch", "plan", "plan_of"]


def plan(
    model: Any,
    optimizer: Any = None,
    sample_batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    capability: tuple[int, int] | None = None,
    amp: torch.dtype | None = None,
    save: str | None = None,
    checkpoint_every: int | None = None,
    accumulation: int = 1,
    accumulator: bool = False,
    prefetch: bool = False,
    release: bool | int = False,
    scaler: bool = False,
    max_grad_norm: float | None = None,
    set_to_none: bool = True,
    offload: Literal["state", "step"] | None = None,
    weights: Literal["host"] | Mapping[str | int, str] | None = None,
    world_size: int | DeviceMesh | None = None,
    shard: str | DDP | FSDP | Sequence[Any] | None = None,
    measure: bool = False,
) -> Plan:
    """Returns the memory that training steps will need, without taking it.

    Two steps run on fake tensors, and no GPU is needed. Nothing is computed, except that a plan for
    the CPU runs each convolution, LSTM and 16-bit product once on zeros, of up to 64 MiB, to see
    its scratch memory. The model, optimizer, batch and random numbers stay as they are.

    Args:
        model: a module, on any one device, the meta device included; a function that makes one, or
            its name as ``"module:function"``; or a configuration of transformers, as an object, a
            folder or a JSON file.
        optimizer: of the model's parameters; or a function that makes one from a list of
            parameters, such as a class or a :func:`functools.partial`. None: no step.
        sample_batch: what the model takes. A dict gives named arguments, a tuple or list arguments
            in order. With ``loss``, the last of a tuple is the target.
        loss: of the output and the target: ``loss(model(*inputs), target)``; for a dict of the
            output and the dict. None: the output's ``loss``, or the output itself.
        forward: instead of ``loss``, all that computes it: ``forward(model, sample_batch)``.
        device: "cuda" or "cpu", where the steps will run. None: where the model is.
        capability: the compute capability of the GPU, such as (7, 5) of a T4 or (9, 0) of an H100,
            which decides kernels, workspaces and the context. None: that of the GPU that this
            process uses, or (8, 0).
        amp: a dtype to run the forward pass and the loss in, under :class:`torch.autocast`.
        save: a save level for the blocks of :mod:`headroom.nn`.
        checkpoint_every: as in :func:`headroom.checkpoint_every`.
        accumulation: micro-batches per step, each as large as ``sample_batch``.
        accumulator: gradients of micro-batches are summed in float32 by a
            :class:`headroom.GradAccumulator`.
        prefetch: the batches of all micro-batches come from a
            :class:`headroom.data.DevicePrefetcher`, which holds the next one on a GPU meanwhile.
        release: gradients are released in the backward pass by
            :func:`headroom.release_gradients`; several micro-batches need an ``accumulator``, and
            get one. A number is its ``bucket_bytes``.
        scaler: losses are scaled by a :class:`torch.amp.GradScaler`.
        max_grad_norm: gradients are clipped to this norm before the step, by
            :func:`headroom.clip_grad_norm_`.
        set_to_none: of ``optimizer.zero_grad``. With False, gradients stay allocated from one step
            to the next.
        offload: "state" keeps the state of the optimizer on the host, but for a ring that it passes
            through, as :func:`headroom.optim.offload` does; "step" steps it there, too, where the
            device is CUDA. An optimizer that is offloaded already, with a budget or without, is
            planned as it is.
        weights: "host" keeps the weights of the repeated blocks on the host, or a dict of "host"
            those of some, as :func:`headroom.patch` does. A model that was patched so is planned as
            it is.
        world_size: ranks, or the mesh of them, of which the last dimension shards. The plan is of
            rank 0, and ``sample_batch`` what one rank gets. A model of DistributedDataParallel
            needs neither this nor ``shard``; one of ``fully_shard`` is planned before that.
        shard: "ddp", the default; "fsdp", which shards each repeated block and then the model by
            ``fully_shard``; "fsdp-no-reshard", which keeps whole parameters from the forward to the
            backward pass; a list of the modules to shard besides the model, by themselves, names
            or classes; or a :class:`headroom.planning.DDP` or :class:`~headroom.planning.FSDP`,
            which has more options.
        measure: runs two real steps under :func:`headroom.memory.track` instead, on copies.

    Raises:
        PlanError: an operation asks for values that fakes do not have, has no fake kernel, or
            raises. Says which one, and in which module.
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    if measure and capability is not None:
        raise ValueError("capability is of a plan, and measure=True runs steps: leave one of both")
    if offload not in (None, "state", "step"):
        raise ValueError(f'offload must be "state", "step" or None, got {offload!r}')
    step = check_step(
        Step(
            model,
            optimizer,
            sample_batch,
            loss,
            forward,
            device=None if device is None else torch.device(device),
            capability=capability,
            amp=amp,
            scaler=scaler,
            save=save,
            accumulation=accumulation,
            accumulator=accumulator,
            prefetch=prefetch,
            release=release,
            checkpoint_every=checkpoint_every,
            max_grad_norm=max_grad_norm,
            set_to_none=set_to_none,
            offload=offload,
            weights=weights,
        ),
        world_size,
        shard,
    )
    if measure:
        from .real_steps import plan_of_real_steps

        return plan_of_real_steps(step)
    return plan_of(step)


def plan_of(step: Step, watch: Callable[[nn.Module, Recorder], None] | None = None) -> Plan:
    """Returns the plan of a step that was checked; ``watch`` is that of :func:`trace`."""
    with planned_for(step.capability):
        timeline = trace(step, watch)
        share = device_share(timeline)
    model = type(step.model).__name__
    return Plan(
        timeline, share, model, step.described(), lambda of, top: advise(step, of, plan_of, top)
    )


def fits(
    model: Any,
    optimizer: Any = None,
    sample_batch: Any = None,
    *,
    budget: int | str,
    **options: Any,
) -> bool:
    """Returns whether training steps need at most ``budget`` bytes, such as "16 GiB", on their
    device.

    All other arguments are those of :func:`plan`. On CUDA the allocator's share and the context
    count too.
    """
    return plan(model, optimizer, sample_batch, **options).fits(budget)


def max_batch(
    model: Any,
    optimizer: Any = None,
    sample_batch: Any = None,
    *,
    budget: int | str,
    limit: int = 65536,
    **options: Any,
) -> int:
    """Returns the most samples of a batch with which training steps need at most ``budget`` bytes;
    0 if not even one fits. Plans about ten times.

    Args:
        sample_batch: its tensors that have a row for each sample get as many rows as are tried,
            as :func:`headroom.micro_batches` knows them.
        limit: no more samples than this are tried.

    All other arguments are those of :func:`plan`.
    """
    size = parse_bytes(budget, "budget")

    def does_fit(samples: int) -> bool:
        return plan(model, optimizer, resized(sample_batch, samples), **options).fits(size)

    bound = 1
    while bound <= limit and does_fit(bound):
        bound *= 2
    tried = range(bound // 2 + 1, min(bound, limit + 1))  # of which the first ones fit
    return bound // 2 + bisect_left(tried, True, key=lambda samples: not does_fit(samples))
