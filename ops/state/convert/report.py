"""Reports what a conversion lost, measured by reading back what was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .codes import floats_of
from .neutral import State, step64


@dataclass
class Loss:
    """Says what became of one part of the state of one parameter, or of an option."""

    param: Any  # its key in the state dict; None for an option of a group
    name: str  # "exp_avg", "step", "maximize", ...
    kind: str  # "none", "rounded" or "dropped"
    error: float = 0.0  # the largest of an element
    largest: float = 0.0  # the largest magnitude of an element before

    @property
    def relative(self) -> float:
        """Returns the error, in units of the largest element."""
        return self.error / self.largest if self.largest else self.error


@dataclass
class Report:
    """Lists the losses of a conversion, part by part, with notes."""

    source: str
    target: str
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_lossless(self) -> bool:
        """Returns whether every part of every state was kept to the bit, and every option that
        changes steps."""
        return all(loss.kind == "none" for loss in self.losses)

    def __str__(self) -> str:
        lines = [f"{self.source} to {self.target}:"]
        for name in dict.fromkeys(loss.name for loss in self.losses):
            mine = [loss for loss in self.losses if loss.name == name]
            parts = []
            for kind, said in (("none", "kept"), ("rounded", "rounded"), ("dropped", "dropped")):
                some = [loss for loss in mine if loss.kind == kind]
                if some:
                    parts.append(f"{len(some):,} {said}")
                if some and kind == "rounded":
                    worst = max(some, key=lambda loss: loss.relative)
                    parts[-1] += (
                        f", by up to {worst.error:.2g}, {worst.relative:.2g} of the tensor's "
                        f"largest (parameter {worst.param})"
                    )
            lines.append(f"    {name}: {'; '.join(parts)}")
        return "\n".join(lines + [f"    {note}" for note in self.notes])


def losses(key: Any, before: State, after: State) -> Iterable[Loss]:
    """Yields what became of each part of a state."""
    yield _loss(key, "step", step64(before), step64(after))
    for name, moment in before.moments.items():
        yield _loss(key, name, moment, after.moments.get(name))
    for name, tensor in before.beside.items():
        yield _loss(key, name, tensor, after.beside.get(name))
    yield from (Loss(key, name, "dropped") for name in before.others)


def _loss(key: Any, name: str, before: Any, after: Any) -> Loss:
    if before is None or after is None:
        return Loss(key, name, "dropped")
    pairs = (before, after), (getattr(before, "codes", 0), getattr(after, "codes", 1))
    if any(a is b for a, b in pairs):
        return Loss(key, name, "none")
    wide = torch.float64 if name == "step" else torch.float32
    before, after = floats_of(before).to(wide), floats_of(after).to(wide)
    if torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
        return Loss(key, name, "none")
    error = (before - after).abs().max().item()
    return Loss(key, name, "rounded", error, before.abs().max().item())
