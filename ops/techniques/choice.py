"""A choice of how a model is trained, as one value that JSON can carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .technique import TECHNIQUES, allowable


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
        others: fields of techniques that were added to those of Headroom, with their values. They
            are attributes too.
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
    others: tuple[tuple[str, Any], ...] = ()

    def __getattr__(self, name: str) -> Any:
        for technique in TECHNIQUES:
            if technique.field == name:
                return dict(vars(self).get("others", ())).get(name, technique.default)
        raise AttributeError(f"a Choice has no field {name!r}")

    def but(self, **changes: Any) -> Choice:
        """Returns the choice with some fields replaced."""
        if others := {name: changes.pop(name) for name in changes.keys() - vars(self).keys()}:
            found = dict(self.others) | others
            used = {t.field for t in TECHNIQUES if found.get(t.field, t.default) != t.default}
            changes["others"] = tuple(sorted((name, found[name]) for name in used))
        return replace(self, **changes)

    @property
    def changes(self) -> int:
        """Returns how many techniques are used besides levels."""
        return sum(t.counts and t.is_used(self) for t in TECHNIQUES)

    @property
    def needs(self) -> tuple[str, ...]:
        """Returns what must be allowed for it."""
        used = {technique.needs(self) for technique in TECHNIQUES if technique.allowed}
        return tuple(name for name in allowable() if name in used)

    @property
    def dtype(self) -> torch.dtype | None:
        """Returns the dtype that weights are cast to, or None."""
        return torch.bfloat16 if self.weights == "bf16" else None

    def to_json(self) -> dict[str, Any]:
        """Returns the choice in what :mod:`json` writes."""
        found = vars(self) | {"levels": list(self.levels)} | dict(self.others)
        del found["others"]
        return found

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
        found = {**value}
        found |= dict(found.pop("others", ()))
        known = {technique.field: technique for technique in TECHNIQUES}
        for name, got in found.items():
            if name not in known:
                names = dict.fromkeys((*cls().to_json(), *known))
                raise ValueError(f"choice has {name!r}, wanted some of {', '.join(names)}")
            if (wanted := known[name].refusal_of_type(got)) is not None:
                raise ValueError(f"choice has {name}={got!r}, wanted {wanted}")
        return cls(tuple(found.pop("levels", ()))).but(**found)

    def __str__(self) -> str:
        """Returns what is changed, in a few words."""
        used = [technique for technique in TECHNIQUES if technique.is_used(self)]
        used.sort(key=lambda technique: technique.told)
        return ", ".join(part for t in used for part in t.words(self)) or "as it is"
