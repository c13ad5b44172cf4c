"""Prepares the op of an optimizer for the buckets of a plan, or for lists of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .._core.dtensor import local_part
from .._core.grouping import positions_by_device
from .plan import Bucket, Plan, like_param, tables_with_states
from .scalars import StepScalars
from .states import StatefulOptimizer

__all__ = ["Call", "explained", "fill_columns", "prepared", "prepared_gathered", "table_call"]

Call = Callable[[], None]  # steps the parameters of a bucket


def prepared(optimizer: Any, plan: Plan, scalars: StepScalars) -> list[Call]:
    """Returns the calls that step the parameters of a plan. Missing states, and all else that a
    step allocates, are made here: the calls themselves only write, so that a step that runs out of
    memory has written nothing."""
    try:
        tables = tables_with_states(optimizer, plan)
    except (RuntimeError, NotImplementedError) as error:
        raise explained(optimizer, error, plan.params, plan.grads) from error
    if any(table is None for table in tables):
        return prepared_gathered(optimizer, plan.group, scalars)
    return [
        _prepared(optimizer, plan.group, bucket, table, scalars)
        for bucket, table in zip(plan.buckets, tables)
    ]


def prepared_gathered(optimizer: Any, group: dict[str, Any], scalars: StepScalars) -> list[Call]:
    """Returns the calls that step the parameters of a group by ops that take lists of tensors."""
    return [
        _prepared(optimizer, group, bucket, states, scalars)
        for bucket, states in _gathered(optimizer, group)
    ]


def table_call(op: Callable[..., None], bucket: Bucket, table: Tensor, options: Any) -> Call:
    """Returns the call of an op that takes a table of a bucket."""

    def call() -> None:
        torch.autograd.graph.increment_version(bucket.params)
        op(bucket.params[0], table, **options)

    return call


def _prepared(
    optimizer: Any,
    group: dict[str, Any],
    bucket: Bucket,
    states: list[list[Tensor]] | Tensor,
    scalars: StepScalars,
) -> Call:
    if torch.compiler.is_compiling():
        return optimizer._prepared(group, bucket, states, scalars)
    with _explaining(optimizer, bucket):
        call = optimizer._prepared(group, bucket, states, scalars)

    def explaining() -> None:
        with _explaining(optimizer, bucket):
            call()

    return explaining


@contextmanager
def _explaining(optimizer: StatefulOptimizer, bucket: Bucket) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        raise explained(optimizer, error, bucket.owners, bucket.grads) from error


def fill_columns(
    optimizer: StatefulOptimizer, group: dict[str, Any], columns: Sequence[list[Tensor]]
) -> None:
    """Fills lists with the parameters that have gradients, the gradients, and the states, which it
    makes if they are missing. Each layout of the group has such lists, one layout after another."""
    rest = iter(columns)
    every = optimizer._every_layout(group)
    lists = {
        (layout.index, layout.weights): (layout, list(islice(rest, 2 + len(layout.slots))))
        for layout in every
    }
    for param in group["params"]:
        if param.grad is None:
            continue
        key = optimizer._layout_index(param, group), optimizer._weights_mode(param, group)
        layout, chosen = lists[key]
        entry = optimizer._entry(param, group)
        values = (param, param.grad, *(entry[name] for name in layout.names))
        for value, column in zip(values, chosen):
            column.append(value)


def _gathered(optimizer: Any, group: dict[str, Any]) -> list[tuple[Bucket, list[list[Tensor]]]]:
    """Returns the buckets of a group by layout and device, with their states as lists of
    tensors."""
    every = optimizer._every_layout(group)
    lists: list[list[list[Tensor]]] = [[[] for _ in range(2 + len(one.slots))] for one in every]
    optimizer._init_group(group, *(column for columns in lists for column in columns))
    for params, grads, *_ in lists:
        if any(param.device.type not in ("cpu", "cuda") for param in params):
            raise explained(optimizer, NotImplementedError(), params, grads)
    buckets = []
    for layout, (owners, grads, *states) in zip(every, lists):
        grads = [like_param(grad, param) for grad, param in zip(grads, owners)]
        columns = [list(map(local_part, column)) for column in (owners, grads, *states)]
        for chosen in positions_by_device(owners).values():
            members = [[column[i] for i in chosen] for column in (owners, *columns)]
            buckets.append((Bucket(layout, *members[:3]), members[3:]))
    return buckets


def explained(
    optimizer: StatefulOptimizer,
    error: Exception,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> Exception:
    """Returns the error of an op on these parameters, with the name of the parameter that it is
    about."""
    ours = type(optimizer).__name__
    for param, grad in zip(params, grads):
        if grad.layout != torch.strided or param.layout != torch.strided:
            return RuntimeError(
                f"{ours} does not support sparse gradients, but {optimizer._name_of(param)} has "
                "one; use sparse=False in its module, or torch.optim.SparseAdam for it"
            )
        if optimizer._refusal(param, "") is not None:
            return RuntimeError(optimizer._refusal(param, optimizer._name_of(param)))
        if param.device.type not in ("cpu", "cuda"):
            return RuntimeError(
                f"{ours} runs on the CPU and on CUDA devices, but {optimizer._name_of(param)} is "
                f"on {param.device}"
            )
    place = re.search(r"\[(\d+)\]", str(error))
    if type(error) is not RuntimeError or place is None or int(place[1]) >= len(params):
        return error
    return RuntimeError(f"{error}; index {place[1]} is {optimizer._name_of(params[int(place[1])])}")
