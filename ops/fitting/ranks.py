"""Lets ranks act as one: the first chooses, and what fails on one of them fails on all.

Ranks that train one model by DistributedDataParallel must do the same in a step, but they measure
different times, and may have GPUs of different memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from .._core.ranks import world_size

_Value = TypeVar("_Value")


class RankError(RuntimeError):
    """Another rank has raised."""


def gathered(compute: Callable[[], _Value], *, group: Any = None) -> list[_Value]:
    """Returns what ``compute()`` returned on each rank, in the order of the ranks.

    ``compute`` must not communicate: the other ranks would wait for one that raised.

    Raises:
        RankError: on the ranks where ``compute`` did not raise, if it raised on another. Where it
            did, its own exception is raised, after the others have been told.
    """
    if (size := world_size(group)) == 1:
        return [compute()]
    failure, answer = None, (None, None)
    try:
        answer = None, compute()
    except Exception as error:
        failure, answer = error, (f"{type(error).__name__}: {error}", None)
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, answer, group)
    if failure is not None:
        raise failure
    if broken := [f"rank {k}: {error}" for k, (error, _) in enumerate(answers) if error]:
        raise RankError("; ".join(broken))
    return [value for _, value in answers]


def from_first(compute: Callable[[], _Value], *, group: Any = None) -> _Value:
    """Returns what ``compute()`` returned on the first rank, on all ranks; on the others it is not
    called. Errors are those of :func:`gathered`."""
    is_first = world_size(group) == 1 or dist.get_rank(group) == 0
    return gathered(lambda: compute() if is_first else None, group=group)[0]  # type: ignore[return-value]


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
