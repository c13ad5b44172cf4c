"""Reports what patch() did to a model."""

from __future__ import annotations

import dataclasses
import weakref
from itertools import chain

from torch import nn

from .._core.grouping import grouped
from .._core.sizes import format_bytes
from .changes import undo


@dataclasses.dataclass(frozen=True)
class Swap:
    """A module that runs other code now.

    Attributes:
        name: of the module in the model.
        kind: what it is, such as "RMSNorm" or "loss".
        was: its class.
        now: the function that it calls.
    """

    name: str
    kind: str
    was: str
    now: str


@dataclasses.dataclass(frozen=True)
class Left:
    """A module that looked like something to swap, and why it was left as it is."""

    name: str
    was: str
    reason: str


class PatchReport:
    """Lists what patch() did to a model.

    Attributes:
        model: the class of the model.
        architecture: how it is known, or None for one that is not.
        swapped: the modules that run other code, by name; one module may be swapped in several
            ways, so the values are lists of :class:`Swap`.
        levels: the level of each block whose level was set, by name.
        streamed: the bytes of weights on the host, of each block whose weights stream, by name.
        left: the modules that were recognized but left alone, and why.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = type(model).__name__
        self.architecture: str | None = None
        self.swapped: dict[str, list[Swap]] = {}
        self.levels: dict[str, str] = {}
        self.streamed: dict[str, int] = {}
        self.left: list[Left] = []
        self._root = weakref.ref(model)  # a report keeps no model alive
        self._blocks: dict[str, str] = {}
        self._claimed: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def _swap(self, name: str, module: nn.Module, kind: str, now: str) -> None:
        """Notes that ``module`` calls the function ``now``."""
        one = Swap(name, kind, type(module).__name__, now)
        self.swapped.setdefault(name, []).append(one)

    def _leave(self, name: str, module: nn.Module, reason: str) -> None:
        """Notes why ``module`` was left alone."""
        self.left.append(Left(name, type(module).__name__, reason))

    def _claim(self, *modules: nn.Module) -> None:
        """Says that a layer does what these modules do by itself: nothing else changes them."""
        self._claimed.update(modules)

    def _is_claimed(self, module: nn.Module) -> bool:
        return module in self._claimed

    def _set_level(self, name: str, module: nn.Module, level: str) -> None:
        """Notes the level of a block."""
        self.levels[name] = level
        self._blocks[name] = type(module).__name__

    def _stream(self, name: str, module: nn.Module, size: int) -> None:
        """Notes how many bytes of a block's weights stream."""
        self.streamed[name] = size
        self._blocks[name] = type(module).__name__

    @property
    def changed(self) -> bool:
        """Returns whether anything was changed."""
        return bool(self.swapped or self.levels or self.streamed)

    def undo(self) -> None:
        """Undoes the changes, as :func:`headroom.unpatch` does."""
        model = self._root()
        if model is not None:
            undo(model.named_modules())

    def __str__(self) -> str:
        known = self.architecture or "not an architecture that Headroom knows"
        lines = [f"headroom.patch: {self.model} ({known})"]
        swaps = grouped(chain(*self.swapped.values()), lambda one: (one.kind, one.was, one.now))
        for (kind, was, now), same in swaps.items():
            what = kind if kind == was else f"{kind} ({was})"
            lines.append(f"  {len(same)} {what} -> {now}")
        lines += self._level_lines()
        for (was, reason), same in grouped(self.left, lambda one: (one.was, one.reason)).items():
            where = same[0].name + (" and others" if len(same) > 1 else "")
            lines.append(f"  left alone: {len(same)} {was} ({where}): {reason}")
        if not self.changed:
            lines.append("  nothing was recognized, and nothing was changed")
        return "\n".join(lines)

    def _level_lines(self) -> list[str]:
        lines = []
        groups = grouped(self.levels, lambda name: (self._blocks[name], self.levels[name]))
        for (block, level), names in groups.items():
            lines.append(f"  {_blocks(names, block)} at {level}: {_range(names)}")
        for block, names in grouped(self.streamed, lambda name: self._blocks[name]).items():
            size = format_bytes(sum(self.streamed[name] for name in names))
            what = f"{_blocks(names, block)} with weights on the host"
            lines.append(f"  {what}, {size}: {_range(names)}")
        return lines

    def __repr__(self) -> str:
        swaps = sum(len(swaps) for swaps in self.swapped.values())
        return (
            f"PatchReport({self.model}: {swaps} swapped, {len(self.levels)} levels, "
            f"{len(self.left)} left alone)"
        )


def _blocks(names: list[str], kind: str) -> str:
    return f"{len(names)} {'block' if len(names) == 1 else 'blocks'} ({kind})"


def _range(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
