"""One plan for all ranks: each rank proposes one, each prices all of them, and one is taken.

Ranks that train one model by DistributedDataParallel must do the same in a step, but they measure
different times, and may have GPUs of different memory and speed. What they exchange is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from .._core.sizes import format_bytes
from .choice import Choice
from .search import Found

__all__ = [
    "Agreed",
    "NoAgreement",
    "RankError",
    "agreed",
    "best_of_ranks",
    "gathered",
    "together",
    "world_size",
]

ROUNDS = 4  # of proposals; a second is rare, where the batches of the ranks differ in shape


class RankError(RuntimeError):
    """Another rank has raised."""


class NoAgreement(ValueError):
    """No proposal fits into the budgets of all ranks."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks take.

    Attributes:
        choice: the proposal.
        peaks: bytes at its peak, by rank.
        seconds: of a step, by rank.
    """

    choice: Any
    peaks: tuple[int, ...]
    seconds: tuple[float, ...]


def world_size(group: Any = None) -> int:
    """Returns the number of ranks of a process group; 1 where there are no processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


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
    answers = [json.loads(text) for text in _exchanged(answer, group)]
    if failure is not None:
        raise failure
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


def _exchanged(text: str, group: Any) -> list[str]:
    size = world_size(group)
    if size == 1:
        return [text]
    texts = [""] * size
    dist.all_gather_object(texts, text, group)
    return texts


def agreed(
    propose: Callable[[int], Any],
    price: Callable[[Any], tuple[int, float]],
    budget: int,
    *,
    group: Any = None,
) -> Agreed:
    """Returns one choice for all ranks, the same on each.

    Every rank proposes a choice for the smallest budget of all, and prices the proposals of all
    ranks by its own costs. Taken is the one that fits on every rank and whose slowest rank is the
    fastest, because a step lasts as long as it does there. Where none fits everywhere, because the
    ranks have batches of different shapes, the ranks propose again, for what is left of the budget
    without the least excess.

    Args:
        propose: returns the best choice within a budget in bytes, as plain data that JSON carries.
        price: returns the bytes at the peak and the seconds of a step of a choice, on this rank.
        budget: bytes that this rank may take.
        group: the ranks that agree; None: all.

    Raises:
        NoAgreement: no proposal fits on every rank.
        RankError: another rank has raised; see :func:`gathered`.
    """
    budgets = [int(value) for value in gathered(lambda: int(budget), group=group)]
    limit, excess = min(budgets), 0
    for _ in range(ROUNDS):
        limit -= excess
        proposals = _distinct(gathered(partial(propose, limit), group=group))
        prices = gathered(partial(_prices, price, proposals), group=group)
        offers = [
            Agreed(
                choice,
                tuple(int(of_rank[k][0]) for of_rank in prices),
                tuple(float(of_rank[k][1]) for of_rank in prices),
            )
            for k, choice in enumerate(proposals)
        ]
        found = [offer for offer in offers if _excess(offer, budgets) <= 0]
        if found:
            return min(found, key=lambda offer: (max(offer.seconds), max(offer.peaks)))
        excess = min(_excess(offer, budgets) for offer in offers)
    raise NoAgreement(
        f"no choice fits on all {len(budgets)} ranks, whose budgets are "
        f"{', '.join(format_bytes(value) for value in budgets)}: the best is above one of them by "
        f"{format_bytes(excess)}. Give a larger budget, or batches of equal shapes"
    )


def _prices(price: Callable[[Any], tuple[int, float]], choices: Sequence[Any]) -> list[Any]:
    return [price(choice) for choice in choices]


class Prices(Protocol):
    """What says what a choice costs on this rank."""

    def priced(self, choice: Choice) -> Found:
        """Returns a choice with its plan and its time, whoever made it."""
        ...


def best_of_ranks(
    search: Prices, propose: Callable[[int], Found], budget: int, group: Any = None
) -> Found:
    """Returns what all ranks take, with this rank's plan and the seconds of the slowest rank.

    Args:
        search: of this rank, which prices the proposals of others.
        propose: returns the best choice within a budget, or raises.
        budget: bytes that this rank may take.
        group: as in :func:`agreed`.
    """
    if world_size(group) == 1:
        return propose(budget)

    def price(entry: Mapping[str, Any]) -> tuple[int, float]:
        found = search.priced(Choice.from_json(entry))
        return found.plan.total_bytes, found.seconds

    taken = agreed(lambda limit: propose(limit).choice.to_json(), price, budget, group=group)
    return replace(search.priced(Choice.from_json(taken.choice)), seconds=max(taken.seconds))


def _excess(offer: Agreed, budgets: Sequence[int]) -> int:
    """The most bytes that a rank would take above its budget."""
    return max(peak - budget for peak, budget in zip(offer.peaks, budgets, strict=True))


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Values without repetitions, in order."""
    return [value for k, value in enumerate(values) if value not in values[:k]]
