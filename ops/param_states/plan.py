"""Plans a step: the buckets of parameters that one op takes, and the op's arguments for each.

An op gets a table of the addresses of a bucket, which is read afresh in every step. Where one
cannot be made (DTensors, tensors that are not contiguous, a traced step), it gets lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._core.checks import lr_arguments
from .._core.dtensor import place_of
from .._core.names import name_of
from .._core.overlap import overlapping, place_in_memory
from .._core.table import joined
from .._core.weight_modes import NEAREST, weight_seeds
from .states import Layout

Call = Callable[[], None]  # steps the parameters of a bucket
Options = dict[str, Any]  # of a group or of an op, by name
States = list[list[Tensor]] | Tensor  # the lists that a layout names, or a table


class StepScalars(NamedTuple):
    """Holds tensors of one element that a step reads without waiting for the device."""

    grad_scale: Tensor | None = None  # gradients are divided by it
    found_inf: Tensor | None = None  # the step changes nothing if it is not 0
    clip_coef: Tensor | None = None  # gradients are multiplied by it

    def joined(
        self, found_inf: Tensor | None = None, clip_coef: Tensor | None = None
    ) -> StepScalars:
        """Returns the scalars of a step that either flag skips, and both factors clip."""
        if found_inf is not None and self.found_inf is not None:
            found_inf = torch.maximum(found_inf, self.found_inf.to(found_inf.device))
        if clip_coef is not None and self.clip_coef is not None:
            clip_coef = clip_coef * self.clip_coef.to(clip_coef.device)
        return self._replace(
            found_inf=self.found_inf if found_inf is None else found_inf,
            clip_coef=self.clip_coef if clip_coef is None else clip_coef,
        )


class Bucket(NamedTuple):
    """Holds the parameters of a group that one op takes: all have states of one layout."""

    layout: Layout
    owners: list[Tensor]  # the optimizer's parameters
    params: list[Tensor]  # their shards on this rank; the owners themselves if not sharded
    grads: list[Tensor]
    positions: Tensor | None = None  # among the group's parameters with gradients; None: all


Calls = list[tuple[Bucket, Call]]  # of a step


class Plan(NamedTuple):
    """Holds a step of a group: its parameters with gradients, in buckets, and a table for each
    bucket, or None if a table cannot be made or states are missing."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    buckets: list[Bucket]
    tables: list[Tensor | None]


def like_param(grad: Tensor, param: Tensor) -> Tensor:
    """Returns a gradient, resharded as its parameter if that is a DTensor."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        return grad.redistribute(placements=param.placements)
    return grad


def buckets_of(
    layouts: tuple[Layout, ...], indices: list[int], params: list[Tensor], grads: list[Tensor]
) -> list[Bucket]:
    """Returns a bucket for each layout among the parameters of a group. ``layouts`` are all that
    the group may have, and ``indices`` say which one each parameter has, its weights' mode
    aside."""
    if len(layouts) == 1:
        return [Bucket(layouts[0], params, params, grads)]
    mode = layouts[-1].weights
    dtypes = () if mode is NEAREST else mode.params
    found = [2 * index + (param.dtype in dtypes) for index, param in zip(indices, params)]
    numbers = {2 * one.index + (one.weights is not NEAREST): one for one in layouts}
    present = set(found)
    if len(present) == 1:
        return [Bucket(numbers[found[0]], params, params, grads)]
    buckets = []
    for number in sorted(present):
        mask = [one == number for one in found]
        chosen = list(compress(params, mask))
        positions = torch.tensor(list(compress(range(len(mask)), mask)), device="cpu")
        owned = list(compress(grads, mask))
        buckets.append(Bucket(numbers[number], chosen, chosen, owned, positions))
    return buckets


def arguments_of(
    bucket: Bucket,
    group: dict[str, Any],
    groups: list[dict[str, Any]],
    scalars: StepScalars,
    stalled: Tensor | None,
) -> dict[str, Any]:
    """Returns the arguments that every optimizer's op takes for a bucket: the learning rate, the
    scalars of the step, and how the parameters are stored."""
    device, lr = bucket.params[0].device, group["lr"]
    if isinstance(lr, Tensor) and not lr.is_cpu:
        lr = lr.to(device)
    arguments = lr_arguments(0.0 if lr is None else lr, device)
    for name, scalar in zip(scalars._fields, scalars):
        arguments[name] = None if scalar is None else scalar.to(device, torch.float32)
    mode, owners = bucket.layout.weights, bucket.owners
    arguments["weights_mode"] = mode.number
    if mode.is_random:
        places = places_in(groups)
        seeds = weight_seeds(group.get("seed", 0), (places[param] for param in owners))
        arguments["weight_seeds"] = seeds
        if any(isinstance(param, DTensor) for param in owners):
            arguments["places"] = [number for param in owners for number in place_of(param)]
    if stalled is not None:
        arguments["stalled"] = stalled
    return arguments


def places_in(groups: list[dict[str, Any]]) -> dict[Tensor, int]:
    """Returns the place of each parameter among all, which is the same on every rank."""
    return {p: place for place, p in enumerate(p for group in groups for p in group["params"])}


def table_call(op: Callable[..., None], bucket: Bucket, table: Tensor, options: Any) -> Call:
    """Returns the call of an op that takes a table of a bucket."""

    def call() -> None:
        torch.autograd.graph.increment_version(bucket.params)
        op(bucket.params[0], table, **options)

    return call


def table_of_grads(plans: list[Plan]) -> Tensor | None:
    """Returns a table of all gradients in their order, or None unless every bucket has a table and
    all lie on one device."""
    tables = [table for plan in plans for table in plan.tables]
    devices = {bucket.params[0].device for plan in plans for bucket in plan.buckets}
    if len(devices) != 1 or any(table is None for table in tables):
        return None
    positions, first = [], 0
    for plan in plans:
        for bucket in plan.buckets:
            own = bucket.positions
            own = torch.arange(len(bucket.params), device="cpu") if own is None else own
            positions.append(first + own)
        first += len(plan.params)
    return joined([table[1:2] for table in tables], positions)


# ---- what a step refuses ------------------------------------------------------------------------


def check_memory(groups: list[dict[str, Any]], plans: list[Plan], earlier: list[Any]) -> list[Any]:
    """Returns where the parameters of a step lie in memory. If that has changed, refuses parameters
    that share memory."""
    places: list[Any] = []
    for plan in plans:
        if any(table is None for table in plan.tables):
            places.append(list(map(place_in_memory, plan.params)))
        else:  # addresses and sizes
            places += [table[0, :2] for table in plan.tables]
    same = len(places) == len(earlier) and all(
        torch.equal(now, then)
        if isinstance(now, Tensor) and isinstance(then, Tensor)
        else type(now) is type(then) and now == then
        for now, then in zip(places, earlier)
    )
    if not same:
        check_overlap(groups, [param for plan in plans for param in plan.params])
    return places


def check_overlap(groups: list[dict[str, Any]], params: list[Tensor]) -> None:
    """Refuses parameters that share memory: they would be updated twice, and on CUDA at the same
    time."""
    if (pair := overlapping(params)) is not None:
        first, second = (name_of(groups, params[i]) for i in pair)
        raise ValueError(
            f"{first} and {second} share memory; give the optimizer one of them, or the same "
            "Parameter for both"
        )
