"""A choice of how a model is trained, as one value that JSON can carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .._core.sizes import format_bytes

FORMATS = ("int8", "nf4")
"""Of frozen weights in few bits: the first one changes them the least."""

ALLOWABLE = ("8bit", "bf16", "adafactor", *FORMATS)
"""What changes the mathematics, and is used only if it is allowed."""

PLACES = ("", "state", "step")
"""The values of ``offload`` of a choice."""

SAME = 0.002
"""The share of bytes or seconds below which two choices are no different in a report."""

_OPTIMIZERS = {"headroom": "headroom.optim", "8bit": "8-bit moments", "adafactor": "Adafactor"}


@dataclass(frozen=True)
class Choice:
    """A way to train a model.

    Attributes:
        levels: of each block; empty where blocks stay as they are.
        micro_batches: parts of the batch, whose gradients are added up.
        optimizer: "given", or what takes its place: "headroom", "8bit" or "adafactor".
        weights: "given", or "bf16": bfloat16 with 16 more bits that the optimizer keeps.
        frozen: "given", or the format that the frozen weights of linear layers are in: "int8" or
            "nf4".
        release: whether each gradient is used and freed as soon as it is there.
        offload: "state" where the state of the optimizer lies on the host, "step" where the step
            runs there, too, and "" where neither does.
        state_budget: the bytes of a "state" that stay on the device, with those of the ring that
            the rest passes through; 0: only the ring.
        weights_host: of so many blocks, from the first on, the weights lie on the host, and are
            fetched for each pass.
        fused_loss: whether a language model computes its loss without logits.
    """

    levels: tuple[str, ...] = ()
    micro_batches: int = 1
    optimizer: str = "given"
    weights: str = "given"
    release: bool = False
    fused_loss: bool = False
    offload: str = ""
    state_budget: int = 0
    frozen: str = "given"
    weights_host: int = 0

    def but(self, **changes: Any) -> Choice:
        """Returns the choice with some fields replaced."""
        return replace(self, **changes)

    @property
    def changes(self) -> int:
        """Returns how many techniques are used besides levels."""
        return (
            (self.micro_batches > 1)
            + (self.optimizer != "given")
            + (self.weights != "given")
            + (self.frozen != "given")
            + self.release
            + self.fused_loss
            + bool(self.offload)
            + bool(self.weights_host)
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """Returns what must be allowed for it: some of :data:`ALLOWABLE`."""
        used = self.optimizer, self.weights, self.frozen
        return tuple(name for name in ALLOWABLE if name in used)

    @property
    def dtype(self) -> torch.dtype | None:
        """Returns the dtype that weights are cast to, or None."""
        return torch.bfloat16 if self.weights == "bf16" else None

    def to_json(self) -> dict[str, Any]:
        """Returns the choice in what :mod:`json` writes."""
        return vars(self) | {"levels": list(self.levels)}

    @classmethod
    def from_json(cls, value: Choice | Mapping[str, Any]) -> Choice:
        """Returns the choice that :meth:`to_json` described, or one that was made by hand; fields
        that are not there have their defaults. Earlier versions wrote True for "state".

        Raises:
            TypeError: it is neither.
            ValueError: a field is unknown, or has a value of another type.
        """
        if isinstance(value, Choice):
            value = vars(value)
        if not isinstance(value, Mapping):
            raise TypeError(
                f"choice is {type(value).__name__}, wanted a Choice, or the dict that its "
                "to_json() returned"
            )
        if isinstance(value.get("offload"), bool):
            value = {**value, "offload": "state" if value["offload"] else ""}
        defaults = {part.name: part.default for part in fields(cls)}
        for name, got in value.items():
            if name not in defaults:
                raise ValueError(f"choice has {name!r}, wanted some of {', '.join(defaults)}")
            if name == "levels":
                is_good = isinstance(got, (list, tuple)) and all(type(x) is str for x in got)
                wanted = "a list of names"
            elif name == "offload":
                is_good, wanted = got in PLACES, f"one of {PLACES}"
            else:
                is_good = type(got) is type(defaults[name])
                wanted = f"one of type {type(defaults[name]).__name__}"
            if not is_good:
                raise ValueError(f"choice has {name}={got!r}, wanted {wanted}")
        return cls(**{**value, "levels": tuple(value.get("levels", ()))})

    def __str__(self) -> str:
        """Returns what is changed, in a few words."""
        counts = Counter(self.levels)
        parts = [f"{count} {level}" for level, count in sorted(counts.items())]
        if len(parts) == 1:
            parts = [f"all {level}" for level in counts]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        if self.optimizer != "given":
            parts.append(_OPTIMIZERS[self.optimizer])
        if self.weights != "given":
            parts.append(f"{self.weights} weights")
        if self.frozen != "given":
            parts.append(f"frozen in {self.frozen}")
        if self.offload:
            stays = f" but {format_bytes(self.state_budget)}" if self.state_budget else ""
            parts.append(f"{self.offload} on the host{stays}")
        if self.weights_host:
            parts.append(f"weights of {self.weights_host} blocks on the host")
        parts += ["fused loss"] * self.fused_loss + ["release"] * self.release
        return ", ".join(parts) or "as it is"


@dataclass(frozen=True)
class FrontierPoint:
    """A choice that no other beats in both.

    Attributes:
        peak: bytes of a step on its device, estimated from plans.
        seconds: of a step, estimated.
        choice: how.
        host: bytes on the host, estimated.
    """

    peak: int
    seconds: float
    choice: Choice
    host: int = 0
