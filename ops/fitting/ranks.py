"""Lets ranks act as one: the first chooses, and what fails on one of them fails on all.

Ranks that train one model by DistributedDataParallel must do the same in a step, but they measure
different times, and may have GPUs of different memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["RankError", "from_first", "gathered", "together", "world_size"]

_Value = TypeVar("_Value")


class RankError(RuntimeError):
    """Another rank has raised."""


def world_size(group: Any = None) -> int:
    """Returns the number of ranks of a process group; 1 where there are no processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def from_first(compute: Callable[[], _Value], *, group: Any = None) -> _Value:
    """Returns what ``compute()`` returned on the first rank, on all ranks; on the others it is not
    called.

    Raises:
        RankError: on the other ranks, if ``compute`` raised. It must not communicate: they wait.
    """
    if world_size(group) == 1:
        return compute()
    failure: Exception | None = None
    told: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            told = [None, compute()]
        except Exception as error:
            failure, told = error, [f"rank 0: {type(error).__name__}: {error}", None]
    dist.broadcast_object_list(told, group=group, group_src=0)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise RankError(told[0])
    return told[1]


def gathered(compute: Callable[[], Any], *, group: Any = None) -> list[Any]:
    """Returns what ``compute()`` returned on each rank, in the order of the ranks.

    The values are plain data that JSON carries: tuples arrive as lists, on the own rank too.
    ``compute`` must not communicate: the other ranks would wait for one that raised.

    Raises:
        RankError: on the ranks where ``compute`` did not raise, if it raised on another. Where it
            did, its own exception is raised, after the others have been told.
    """
    failure = None
    try:
        answer = json.dumps({"value": compute()})
    except Exception as error:
        failure = error
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
    size = world_size(group)
    texts = [answer] * size
    if size > 1:
        dist.all_gather_object(texts, answer, group)
    if failure is not None:
        raise failure
    answers = [json.loads(text) for text in texts]
    broken = [
        f"rank {rank}: {told['error']}" for rank, told in enumerate(answers) if "error" in told
    ]
    if broken:
        raise RankError("; ".join(broken))
    return [told["value"] for told in answers]


@contextmanager
def together(group: Any = None) -> Iterator[None]:
    """Runs a block that must not communicate on all ranks: if it raises on one, it does on all."""
    failure: list[Exception] = []

    def answer() -> None:
        if failure:
            raise failure[0]

    try:
        yield
    except Exception as error:
        failure.append(error)
    gathered(answer, group=group)
