"""Reports which layers of a model have an adapter now, and which were left, and why."""

from __future__ import annotations

import dataclasses

from torch import nn

from .._core.grouping import grouped
from .._core.sizes import format_bytes


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A layer that has an adapter now.

    Attributes:
        name: of the layer in the model.
        was: the class of its base.
        rank: of the adapter.
        numel: elements of A and B, and of the lengths of DoRA.
        tied_to: the name of the embedding that has the same weight, and whose adapter this is;
            ``numel`` is then 0.
    """

    name: str
    was: str
    rank: int
    numel: int
    tied_to: str | None = None


@dataclasses.dataclass(frozen=True)
class Copied:
    """A module of which the adapter has a copy that trains.

    Attributes:
        name: of the module in the model.
        was: its class.
        numel: elements of its parameters.
        tied_to: the name of the embedding that has the same weight, and so the same copy of it,
            which is not in ``numel`` then.
    """

    name: str
    was: str
    numel: int
    tied_to: str | None = None


@dataclasses.dataclass(frozen=True)
class Unadapted:
    """A linear layer, or a parameter with the matrices of experts, that has got no adapter.

    Attributes:
        name: of the layer or the parameter in the model.
        was: the class of the layer, or of the module that has the parameter.
        reason: why it was left.
    """

    name: str
    was: str
    reason: str


class LoRAReport:
    """Lists what :func:`headroom.lora` did to a model.

    Attributes:
        model: the class of the model.
        adapted: an :class:`Adapted` per layer.
        left: an :class:`Unadapted` per linear layer without the adapter, and per parameter with
            the matrices of experts.
        copied: a :class:`Copied` per module of ``modules_to_save``.
        trained, trained_bytes: elements and bytes of the parameters that train.
        frozen, frozen_bytes: those of all others; the elements are those that are stored, of
            which a byte of 4-bit codes is one.
    """

    def __init__(
        self,
        model: nn.Module,
        adapted: list[Adapted],
        left: list[Unadapted],
        copied: list[Copied],
    ) -> None:
        self.model = type(model).__name__
        self.adapted, self.left, self.copied = adapted, left, copied
        parameters = [*model.parameters()]
        trained = [p for p in parameters if p.requires_grad]
        self.trained = sum(p.numel() for p in trained)
        self.trained_bytes = sum(p.nbytes for p in trained)
        self.frozen = sum(p.numel() for p in parameters) - self.trained
        self.frozen_bytes = sum(p.nbytes for p in parameters) - self.trained_bytes

    def __str__(self) -> str:
        sizes = format_bytes(self.trained_bytes), format_bytes(self.frozen_bytes)
        lines = [
            f"headroom.lora: {self.model}, {self.trained:,} parameters train: {sizes[0]}, beside "
            f"{sizes[1]} that are frozen"
        ]
        own = [one for one in self.adapted if one.tied_to is None]
        for (was, rank), same in grouped(own, lambda one: (one.was, one.rank)).items():
            numel = sum(one.numel for one in same)
            lines.append(f"  {len(same)} {was} have an adapter of rank {rank}: {numel:,}")
        lines += [
            f"  {one.name} ({one.was}) has the adapter of {one.tied_to}, as it has its weight"
            for one in self.adapted
            if one.tied_to is not None
        ]
        for one in self.copied:
            shared = "" if one.tied_to is None else f", beside the weight of {one.tied_to}"
            lines.append(f"  a copy of {one.name} ({one.was}): {one.numel:,}{shared}")
        for (was, reason), left in grouped(self.left, lambda one: (one.was, one.reason)).items():
            where = left[0].name + (" and others" if len(left) > 1 else "")
            lines.append(f"  left: {len(left)} {was} ({where}): {reason}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"LoRAReport({self.model}: {len(self.adapted)} adapted, {len(self.left)} left, "
            f"{self.trained:,} parameters train)"
        )
