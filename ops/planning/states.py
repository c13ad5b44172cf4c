"""Optimizers whose parameters became shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["move_to_shards"]


def move_to_shards(optimizer: Any, replaced: Mapping[Tensor, tuple[Tensor, int]]) -> None:
    """Gives an optimizer shards in the place of parameters, and states of their sizes.

    States that are neither of the shape of their parameter nor of one element are left out: the
    first step makes them.

    Args:
        replaced: for each parameter its shard, and how many elements it had on all ranks.
    """
    groups = []
    for group in optimizer.param_groups:
        groups += _split(group, replaced)
    optimizer.param_groups[:] = groups
    states: defaultdict[Any, Any] = defaultdict(dict)
    for param, state in optimizer.state.items():
        if param not in replaced:
            states[param] = state
        elif (cut := _cut(state, param, replaced[param][0])) is not None:
            states[replaced[param][0]] = cut
    optimizer.state = states


def _split(group: dict[str, Any], replaced: Mapping[Tensor, tuple[Tensor, int]]) -> list[Any]:
    """Returns the group with shards. Where the number of elements decides about 8-bit states, it is
    that on all ranks: those that are large enough become a group for which no shard is too
    small."""
    least = group.get("min_8bit_size")
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for param in group["params"]:
        shard, size = replaced.get(param, (param, 0))
        parts[least is not None and size >= least].append(shard)
    found = [group | {"params": parts[False]}] if parts[False] else []
    if parts[True]:
        found.append(group | {"params": parts[True], "min_8bit_size": 0})
    return found


def _cut(state: Any, param: Tensor, shard: Tensor) -> dict[str, Any] | None:
    if not isinstance(state, Mapping):
        return None
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == param.shape:
            cut[key] = value.new_empty(shard.shape)
        elif not isinstance(value, Tensor) or value.numel() == 1:
            cut[key] = value
        else:
            return None
    return cut
