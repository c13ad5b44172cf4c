"""Steps Adafactor on DTensors: its sums are added over the ranks between the phases of a step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._core.dtensor import sharded_dim
from ..functional.adafactor import APPLY, NORM, STATES, SUMS, lines_of
from ..param_states.plan import Call

ROWS, COLS, ELEMENTS = "rows", "cols", "elements"  # what a dimension of a mesh shards


def sharding_of(param: Tensor) -> tuple[Any, tuple[str | None, ...]] | None:
    """Returns the mesh of a DTensor and what each dimension of the mesh shards, or None if every
    rank has the whole tensor."""
    if not isinstance(param, DTensor):
        return None
    roles = []
    for placement in param.placements:
        dim = sharded_dim(placement)
        from_end = None if dim is None or param.dim() < 2 else param.dim() - dim
        role = {1: COLS, 2: ROWS}.get(from_end, ELEMENTS)
        roles.append(None if dim is None else role)
    return (param.device_mesh, tuple(roles)) if any(roles) else None


def prepared_sharded(
    owners: list[Tensor],
    mesh: Any,
    roles: tuple[str | None, ...],
    lists: list[list[Tensor]],
    options: dict[str, Any],
) -> Call:
    """Returns the call that runs the phases of a step, and adds sums over the ranks between them.
    Their places in the workspace are documented at ``hr_adafactor`` in ``headroom.h``."""
    params = lists[0]
    wholes = []
    for owner in owners:
        rows, cols = owner.shape[-2:] if owner.dim() >= 2 else (0, 0)
        wholes += [rows * (ROWS in roles), cols * (COLS in roles), owner.numel()]
    size = torch.ops.headroom._adafactor_workspace(params, wholes)
    workspace = torch.empty(size, dtype=torch.float64, device=params[0].device)
    counts = [len(params)] * 2 + [0, 0, 0]
    if ROWS in roles or COLS in roles:
        counts[2] = sum(math.prod(param.shape[:-2]) for param in params)
        counts[3], counts[4] = map(sum, zip(*(lines_of(param.shape) for param in params)))
    squared_params, squared_updates, row_vars, row_sums, col_sums = workspace[: sum(counts)].split(
        counts
    )

    def run(phases: int) -> None:
        torch.ops.headroom.adafactor_(
            *lists, **options, phases=phases, wholes=wholes, workspace=workspace
        )

    def add(sums: Tensor, *over: str) -> None:
        for dim, role in enumerate(roles):
            if role in over and sums.numel() > 0:
                torch.distributed.all_reduce(sums, group=mesh.get_group(dim))

    def call() -> None:
        run(SUMS)
        add(squared_params, ROWS, COLS, ELEMENTS)
        add(row_sums, COLS)
        add(col_sums, ROWS)
        run(STATES)
        add(row_vars, ROWS)
        run(NORM)
        add(squared_updates, ROWS, COLS, ELEMENTS)
        run(APPLY)

    return call
