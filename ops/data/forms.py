"""Groups the batches of an epoch by what they have in common but for sizes, and bounds what steps
need by the plans of some of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..planning import Plan
from ..planning.masks import hidden_by
from ..step.pytree import map_tensors, tensors_in

__all__ = ["Form", "Steps", "next_planned"]

Sizes = tuple[int, ...]
"""All sizes of all tensors of a batch."""


class Need(NamedTuple):
    """Holds the bytes that a step needs.

    Attributes:
        total: what the process takes on the device; the peak on the CPU.
        peak: the most bytes of tensors that are live at once.
    """

    total: float
    peak: float


class Form:
    """Batches that differ in nothing but sizes.

    Attributes:
        key: what the batches of a form have in common.
        batches: a batch of each size.
    """

    def __init__(self, batch: Any) -> None:
        named = list(_named(batch))
        dtypes = tuple((name, x.dtype, x.dim()) for name, x in named)
        self.key: Hashable = (dtypes, hidden_by(batch))
        self.batches: dict[Sizes, Any] = {}
        self._names = [f"{name}[{d}]" for name, x in named for d in range(x.dim())]
        self._columns: list[int] | None = None

    def add(self, batch: Any) -> Sizes:
        """Adds a batch, unless there is one of its sizes, and returns these."""
        sizes = tuple(size for _, x in _named(batch) for size in x.shape)
        if sizes not in self.batches:
            # A copy: a batch of a worker holds files of shared memory open.
            copies: dict[int, Tensor] = {}
            self.batches[sizes] = map_tensors(batch, lambda x: copies.setdefault(id(x), x.clone()))
        return sizes

    def named(self, sizes: Sizes) -> dict[str, int]:
        """Returns the sizes that differ between batches, by tensor and dimension. Of those that are
        equal in every batch, only the first is named."""
        if self._columns is None:
            columns = list(zip(*self.batches))
            self._columns = [
                at
                for at, column in enumerate(columns)
                if len({*column}) > 1 and columns.index(column) == at
            ]
        return {self._names[column]: sizes[column] for column in self._columns}


def _named(batch: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Mapping):
        items = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, (tuple, list)):
        items = [(f"batch[{number}]", value) for number, value in enumerate(batch)]
    else:
        items = [("batch", batch)]
    for name, value in items:
        found = [*tensors_in(value)]
        for number, x in enumerate(found):
            yield (f"{name}.{number}" if len(found) > 1 else name), x


@dataclass(eq=False)
class Steps:
    """The steps whose batches have the same sizes, and bounds of what each of them needs. The first
    step of a run needs something else than later ones and stands by itself.

    Attributes:
        form: of their batches.
        sizes: of their batches.
        is_first: whether it is the first step of the run.
        count: how many steps there are.
        least: what each needs at least.
        most: what each needs at most.
    """

    form: Form
    sizes: Sizes
    is_first: bool = False
    count: int = 0
    least: Need = Need(0, 0)
    most: Need = Need(math.inf, math.inf)
    _elements: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._elements = sum(x.numel() for x in tensors_in(self.batch))

    @property
    def batch(self) -> Any:
        """Returns a batch of their sizes."""
        return self.form.batches[self.sizes]

    @property
    def is_exact(self) -> bool:
        """Returns whether the bounds are one."""
        return self.least == self.most

    @property
    def rank(self) -> tuple[Need, bool, int, Sizes]:
        """Returns a key that orders steps by what they need at most. Where nothing is known of two,
        no batch comes after one that is at least as large in every size."""
        return self.most, self.is_exact, self._elements, self.sizes

    def learn(self, form: Form, sizes: Sizes, plan: Plan) -> None:
        """Takes a plan of a batch into account. Of two batches of a form, the one that is at least
        as large in every size needs at least as much."""
        if form is not self.form:
            return
        peak = plan.first_step if self.is_first else plan.steady
        need = Need(peak + plan.device_share.bytes, peak)
        if sizes == self.sizes:
            self.least = self.most = need
        elif self.is_exact:
            return
        elif all(a >= b for a, b in zip(sizes, self.sizes)):
            self.most = min(self.most, need)
        elif all(a <= b for a, b in zip(sizes, self.sizes)):
            self.least = max(self.least, need)


def next_planned(known: list[Steps], largest: int, budget: int | None) -> Steps | None:
    """Returns the steps that are to be planned next; None when so many of the largest are known
    exactly, and of each other step whether it is within the budget."""
    ordered = sorted(known, key=lambda steps: steps.rank, reverse=True)
    covered = 0
    for steps in ordered:
        if covered >= largest:
            break
        if not steps.is_exact:
            return steps
        covered += steps.count
    if budget is None:
        return None
    unsure = [x for x in ordered if x.least.total <= budget < x.most.total]
    return unsure[len(unsure) // 2] if unsure else None
