"""Plans a step: the buckets of parameters that one op takes, and the tables of their addresses.

A table is read afresh in every step. Where one cannot be made (DTensors, tensors that are not
contiguous, a traced step), the op gets lists of tensors: see run.py.
"""

from __future__ import annotations

from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._core.overlap import overlapping, place_in_memory
from .._core.table import joined, table_of
from .._core.weight_modes import NEAREST
from .states import Layout, StatefulOptimizer

__all__ = [
    "Bucket",
    "Plan",
    "check_memory",
    "check_overlap",
    "like_param",
    "plan_group",
    "table_of_bucket",
    "table_of_grads",
    "tables_with_states",
]


class Bucket(NamedTuple):
    """The parameters of a group that one op takes: all have states of one layout."""

    layout: Layout
    owners: list[Tensor]  # the optimizer's parameters
    params: list[Tensor]  # their shards on this rank; the owners themselves if not sharded
    grads: list[Tensor]
    positions: Tensor | None = None  # among the group's parameters with gradients; None: all

    @property
    def device(self) -> torch.device:
        return self.params[0].device


class Plan(NamedTuple):
    """The plan of a step for a group: its parameters with gradients, in buckets, and a table for
    each bucket, or None if a table cannot be made or states are missing."""

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


def plan_group(optimizer: StatefulOptimizer, group: dict[str, Any]) -> Plan:
    """Returns the plan of a step for a group."""
    params = group["params"]
    grads = list(map(attrgetter("grad"), params))
    found = [grad for grad in grads if grad is not None]
    if len(found) < len(grads):
        params = [param for param, grad in zip(params, grads) if grad is not None]
        grads = found
    buckets = _buckets(optimizer, group, params, grads) if params else []
    tables = [optimizer._table(bucket) for bucket in buckets]
    return Plan(group, params, grads, buckets, tables)


def _buckets(
    optimizer: StatefulOptimizer, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
) -> list[Bucket]:
    """Returns a bucket for each layout among the parameters."""
    every = optimizer._every_layout(group)
    if len(every) == 1:
        return [Bucket(every[0], params, params, grads)]
    mode = every[-1].weights
    dtypes = () if mode is NEAREST else mode.params
    found = [
        2 * index + (param.dtype in dtypes)
        for index, param in zip(optimizer._layout_indices(params, group), params)
    ]
    numbers = {2 * one.index + (one.weights is not NEAREST): one for one in every}
    present = set(found)
    if len(present) == 1:
        return [Bucket(numbers[found[0]], params, params, grads)]
    masks = [(numbers[n], [one == n for one in found]) for n in sorted(present)]
    buckets = []
    for layout, mask in masks:
        chosen = list(compress(params, mask))
        positions = torch.tensor(list(compress(range(len(mask)), mask)), device="cpu")
        buckets.append(Bucket(layout, chosen, chosen, list(compress(grads, mask)), positions))
    return buckets


def table_of_bucket(optimizer: StatefulOptimizer, bucket: Bucket) -> Tensor | None:
    """Returns the table of a bucket, or None if it needs the list path or has no states yet."""
    layout = bucket.layout
    try:
        lists = bucket.params, bucket.grads
        return table_of(lists, optimizer.state, layout.param_like, layout.extra)
    except (RuntimeError, NotImplementedError):  # the op's own error is better
        return None


def tables_with_states(optimizer: StatefulOptimizer, plan: Plan) -> list[Tensor | None]:
    """Returns the tables of a plan, after it has made missing states."""
    tables = list(plan.tables)
    for i, bucket in enumerate(plan.buckets):
        if tables[i] is None and any(param not in optimizer.state for param in bucket.params):
            for param in bucket.params:
                optimizer._entry(param, plan.group)
            tables[i] = optimizer._table(bucket)
    return tables


def table_of_grads(plans: list[Plan]) -> Tensor | None:
    """Returns a table of all gradients in their order, or None unless every bucket has a table and
    all lie on one device."""
    tables = [table for plan in plans for table in plan.tables]
    devices = {bucket.device for plan in plans for bucket in plan.buckets}
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


def check_memory(optimizer: StatefulOptimizer, plans: list[Plan], before: list[Any]) -> list[Any]:
    """Returns where the parameters of a step lie in memory. If that has changed, refuses parameters
    that share memory."""
    places: list[Any] = []
    for plan in plans:
        if any(table is None for table in plan.tables):
            places.append(list(map(place_in_memory, plan.params)))
        else:  # addresses and sizes
            places += [table[0, :2] for table in plan.tables]
    same = len(places) == len(before) and all(
        torch.equal(now, then)
        if isinstance(now, Tensor) and isinstance(then, Tensor)
        else type(now) is type(then) and now == then
        for now, then in zip(places, before)
    )
    if not same:
        check_overlap(optimizer, [param for plan in plans for param in plan.params])
    return places


def check_overlap(optimizer: StatefulOptimizer, params: list[Tensor]) -> None:
    """Refuses parameters that share memory: they would be updated twice, and on CUDA at the same
    time."""
    if (pair := overlapping(params)) is not None:
        first, second = (optimizer._name_of(params[i]) for i in pair)
        raise ValueError(
            f"{first} and {second} share memory; give the optimizer one of them, or the same "
            "Parameter for both"
        )
