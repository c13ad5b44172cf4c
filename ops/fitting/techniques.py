"""What can be chosen for a model: optimizers, weights, release, the fused loss, micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..optim import Adam8bit
from ..patching.losses import has_fused_loss, knows_loss
from .choice import Choice
from .micro_batches import counts, mixes_samples, samples_of
from .replacing import is_headroom, obstacle, replacement
from .setting import Setting

__all__ = ["Techniques"]

_LIMITED = {part.name for part in fields(Choice)} - {"levels"}


@dataclass
class Techniques:
    """What can be chosen for a model, besides levels.

    Attributes:
        given: the optimizer of the loop, which may be none of those that can be chosen.
        optimizers: by the fields ``optimizer`` and ``weights`` of a choice.
        fused_losses: the values that ``fused_loss`` can have.
        micro_batches: the values that ``micro_batches`` can have.
        allowed: what changes the mathematics, and may.
        max_grad_norm: that the loop clips gradients to, or None.
        clips: whether something clips the gradients of a step.
        only: the values that fields of a choice may have in the loop that trains; a field that is
            not there may have any.
        notes: why something cannot be chosen.
    """

    setting: Setting
    given: torch.optim.Optimizer
    optimizers: dict[tuple[str, str], torch.optim.Optimizer]
    fused_losses: tuple[bool, ...] = (False,)
    micro_batches: tuple[int, ...] = (1,)
    allowed: tuple[str, ...] = ()
    max_grad_norm: float | None = None
    clips: bool = False
    only: Mapping[str, Collection[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        setting: Setting,
        optimizer: torch.optim.Optimizer,
        allow: Collection[str] = (),
        max_grad_norm: float | None = None,
        only: Mapping[str, Collection[Any]] | None = None,
    ) -> Techniques:
        """Returns the techniques for a model and its optimizer.

        Raises:
            ValueError: ``only`` names no field of a choice, or leaves no value of one.
        """
        found = cls(setting, optimizer, {("given", "given"): optimizer})
        found.allowed, found.max_grad_norm = tuple(allow), max_grad_norm
        limits = [group.get("max_grad_norm") for group in optimizer.param_groups]
        found.clips = max_grad_norm is not None or any(limit is not None for limit in limits)
        found._add_optimizers(optimizer, allow)
        if has_fused_loss(setting.model):
            found.fused_losses = (True,)  # as the user wants it
        elif setting.loss is None and knows_loss(setting.model):
            found.fused_losses = (False, True)
        if mixes_samples(setting.model):
            found.notes.append(
                "micro-batches: not with a BatchNorm in training, whose statistics are over the "
                "whole batch"
            )
        else:
            found.micro_batches = (1, *counts(samples_of(setting.batch)))
        found._limit(only or {})
        return found

    def _limit(self, only: Mapping[str, Collection[Any]]) -> None:
        """Leaves the values of ``only``. Of several numbers of micro-batches, the least is what the
        loop makes anyway."""
        self.only = only
        if wrong := sorted(only.keys() - _LIMITED):
            raise ValueError(f"only has {wrong[0]!r}, wanted some of {', '.join(sorted(_LIMITED))}")
        self.optimizers = {
            (kind, weights): optimizer
            for (kind, weights), optimizer in self.optimizers.items()
            if kind in only.get("optimizer", (kind,)) and weights in only.get("weights", (weights,))
        }
        self.fused_losses = tuple(
            fused for fused in self.fused_losses if fused in only.get("fused_loss", (fused,))
        )
        if "micro_batches" in only:
            samples = samples_of(self.setting.batch) or 1
            numbers = tuple(n for n in sorted(only["micro_batches"]) if samples % n == 0)
            self.micro_batches = numbers[:1] if mixes_samples(self.setting.model) else numbers
        for name, left in (
            ("optimizer", self.optimizers),
            ("fused_loss", self.fused_losses),
            ("micro_batches", self.micro_batches),
        ):
            if not left:
                notes = "".join(f"; {note}" for note in self.notes)
                raise ValueError(
                    f"only has {name}={tuple(only.get(name, ()))!r}, which is not possible for "
                    f"this model and its optimizer{notes}"
                )

    def _add_optimizers(self, given: torch.optim.Optimizer, allow: Collection[str]) -> None:
        if (reason := obstacle(given)) is not None:
            if allow or not is_headroom(given):
                self.notes.append(f"the optimizer stays as it is: {reason}")
            return
        kinds = [] if is_headroom(given) else ["headroom"]
        kinds += ["8bit"] if "8bit" in allow and not isinstance(given, Adam8bit) else []
        kinds += ["adafactor"] if "adafactor" in allow else []
        for kind in kinds:
            self._add(given, kind, None)
        if "bf16" not in allow:
            return
        dtypes = {p.dtype for g in given.param_groups for p in g["params"]}
        if dtypes != {torch.float32}:
            self.notes.append("bf16: not all parameters of the optimizer are float32")
        elif self.setting.scaler or self.setting.amp == torch.float16:
            self.notes.append("bf16: not with float16 or a scaler of losses")
        else:
            own = "8bit" if isinstance(given, Adam8bit) else "headroom"
            for kind in dict.fromkeys((own, *kinds)):
                self._add(given, kind, "remainder16")

    def _add(self, given: torch.optim.Optimizer, kind: str, master: str | None) -> None:
        weights = "given" if master is None else "bf16"
        try:
            self.optimizers[kind, weights] = replacement(given, kind, master)
        except (TypeError, ValueError, RuntimeError) as error:
            self.notes.append(f"{kind}: {error}")

    def only_whole_batches(self) -> tuple[int, ...]:
        """Takes back micro-batches, whose loss is not that of the batch, and returns how many there
        might have been."""
        gone, self.micro_batches = self.micro_batches[1:], (1,)
        self.notes.append(
            "micro-batches: the losses of parts of a batch do not add up to the loss of the batch, "
            "or the model keeps something of each call, such as a moving average"
        )
        return gone

    def optimizer_of(self, choice: Choice) -> torch.optim.Optimizer:
        """Returns the optimizer of a choice."""
        return self.optimizers[choice.optimizer, choice.weights]

    def obstacle(self, choice: Choice) -> str | None:
        """Returns why a choice, whatever its levels, cannot be for this model, or None."""
        notes = "".join(f"; {note}" for note in self.notes)
        made = self.optimizers.get((choice.optimizer, choice.weights))
        if made is None:
            pairs = ", ".join(f"{kind} with {weights}" for kind, weights in self.optimizers)
            return (
                f"has optimizer {choice.optimizer} with weights {choice.weights}, wanted one of "
                f"{pairs}{notes}"
            )
        possible = {"micro_batches": self.micro_batches, "fused_loss": self.fused_losses}
        for name, values in possible.items():
            if (got := getattr(choice, name)) not in values:
                return f"has {name}={got}, wanted one of {', '.join(map(str, values))}{notes}"
        if choice.release and not self.can_release(choice, made):
            return "releases gradients, which this loop or this optimizer needs together"
        return None

    def choices(self, micro_batches: int = 1) -> Iterator[Choice]:
        """Yields all choices with this number of micro-batches, without levels."""
        for (optimizer, weights), made in self.optimizers.items():
            for fused_loss in self.fused_losses:
                base = Choice((), micro_batches, optimizer, weights, False, fused_loss)
                yield base
                if self.can_release(base, made):
                    yield base.but(release=True)

    def can_release(self, choice: Choice, optimizer: Any) -> bool:
        """Returns whether gradients can be released: a step that is made within the backward pass
        can neither clip nor wait for other micro-batches, nor be skipped as a whole."""
        if not is_headroom(optimizer) or self.clips or self.setting.scaler:
            return False
        if True not in self.only.get("release", (True,)):
            return False
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = (p for p in self.setting.model.parameters() if p.requires_grad)
        return choice.micro_batches == 1 and all(id(p) in own for p in trained)
