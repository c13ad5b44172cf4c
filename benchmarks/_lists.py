"""Lists of tensors of the same shapes, as element-wise ops take them: their data, their bytes, and
a case of contenders on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from ._limits import Rotation, sets_needed
from ._model import Shapes, filled_like
from ._timing import Contender
from .harness import Bar, Case


@dataclass
class Lists:
    """`allocate` gives the lists by name; one without a dtype is empty. `passes` says how often a
    call moves each through memory: once if it is only read or only written, twice if both."""

    shapes: Shapes
    dtypes: dict[str, torch.dtype | None]
    passes: dict[str, int]
    zeros: Collection[str] = ()  # the others are filled

    def _bytes(self, passes: dict[str, int]) -> int:
        sizes = [passes[name] * t.itemsize for name, t in self.dtypes.items() if t is not None]
        return sum(map(math.prod, self.shapes)) * sum(sizes)

    @property
    def bytes_moved(self) -> int:
        return self._bytes(self.passes)

    def allocate(self, device: torch.device) -> SimpleNamespace:
        data = SimpleNamespace()
        for name, dtype in self.dtypes.items():
            tensors = []
            if dtype is not None and name in self.zeros:
                tensors = [torch.empty(s, dtype=dtype, device=device).zero_() for s in self.shapes]
            elif dtype is not None:
                tensors = filled_like(self.shapes, dtype, device)
            setattr(data, name, tensors)
        return data

    def rotation(self, device: torch.device) -> Rotation:
        held = self._bytes(dict.fromkeys(self.dtypes, 1))
        return Rotation([self.allocate(device) for _ in range(sets_needed(held, device))])


def on_next(data: Rotation, call: Callable[[SimpleNamespace], object]) -> Contender:
    return Contender(lambda: call(data.next()))


def list_case(
    name: str,
    what: str,
    lists: Lists,
    contenders: dict[str, Callable[[Rotation], Contender]],
    *bars: Bar,
) -> Case:
    """A case of contenders that share a rotation of the lists; "torch" is the one to beat."""

    def setup(device: torch.device) -> dict[str, Callable[[], Contender]]:
        data = lists.rotation(device)
        return {name: partial(make, data) for name, make in contenders.items()}

    return Case(name, what, setup, "torch", lists.bytes_moved, bars=bars)
