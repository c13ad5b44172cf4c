"""What can be chosen for a model: optimizers, weights, release, the fused loss, micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..optim import Adam8bit
from ..patching.losses import has_fused_loss, knows_loss
from .choice import ALLOWABLE, Choice
from .micro_batches import counts, mixes_samples, samples_of
from .replacing import is_headroom, obstacle, replacement
from .setting import Setting
from .shares import NO_RULE

__all__ = ["Techniques"]


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
        parts_add_up: whether the loop itself sees to it that the losses of parts of a batch add up,
            so that they are not compared with the loss of the batch.
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
    parts_add_up: bool = False
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        setting: Setting,
        optimizer: torch.optim.Optimizer,
        allow: Collection[str] = (),
        max_grad_norm: float | None = None,
        only: Mapping[str, Collection[Any]] | None = None,
        parts_add_up: bool = False,
    ) -> Techniques:
        """Returns the techniques for a model and its optimizer.

        Raises:
            ValueError: ``only`` leaves no value of a field.
        """
        found = cls(setting, optimizer, {("given", "given"): optimizer}, parts_add_up=parts_add_up)
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
        """Leaves the values of ``only``.

        Raises:
            ValueError: a field has none that is possible.
        """
        self.only = only
        possible = self._pairs()
        self.optimizers = {
            (kind, weights): optimizer
            for (kind, weights), optimizer in self.optimizers.items()
            if kind in only.get("optimizer", (kind,)) and weights in only.get("weights", (weights,))
        }
        if not self.optimizers:
            asked = {*only.get("optimizer", ()), *only.get("weights", ())}
            missing = [name for name in ALLOWABLE if name in asked - {*self.allowed}]
            hint = "".join(f'; "{name}" is not in allow' for name in missing)
            self._refuse(("optimizer", "weights"), f"one of {possible}{hint}")
        possible = ", ".join(map(str, self.fused_losses))
        self.fused_losses = tuple(
            fused for fused in self.fused_losses if fused in only.get("fused_loss", (fused,))
        )
        if not self.fused_losses:
            self._refuse(("fused_loss",), f"one of {possible}")
        if "micro_batches" in only:
            self._limit_micro_batches(sorted(set(only["micro_batches"])))
        if False not in only.get("release", (False,)):
            self.optimizers = {
                key: made
                for key, made in self.optimizers.items()
                if self.can_release(Choice((), 1, *key), made)
            }
            if not self.optimizers or 1 not in self.micro_batches:
                self._refuse(
                    ("release", "optimizer", "weights", "micro_batches"),
                    "False in release as well: gradients can be released only where nothing clips "
                    "or scales them, by an optimizer of Headroom's that has all parameters that "
                    "are trained, in one micro-batch",
                )
            self.micro_batches = (1,)

    def _limit_micro_batches(self, numbers: Sequence[int]) -> None:
        """Leaves some numbers of micro-batches. Where samples are mixed, it is the least of a loop
        that weighs the losses itself, which makes so many anyway."""
        samples = samples_of(self.setting.batch) or 1
        found = tuple(number for number in numbers if samples % number == 0)
        wanted = f"numbers that divide the {samples} samples of the batch"
        if mixes_samples(self.setting.model):
            found = found[:1]
            if not self.parts_add_up and found != (1,):
                found, wanted = (), "1 among them"
        self.micro_batches = found
        if not found:
            self._refuse(("micro_batches",), wanted)

    def _refuse(self, names: Sequence[str], wanted: str) -> NoReturn:
        given = ", ".join(
            f"{name}={tuple(self.only[name])!r}" for name in names if name in self.only
        )
        raise ValueError(f"only has {given}, wanted {wanted}{self._reasons()}")

    def _pairs(self) -> str:
        return ", ".join(
            f"optimizer {kind} with weights {weights}" for kind, weights in self.optimizers
        )

    def _reasons(self) -> str:
        return "".join(f"; {note}" for note in self.notes)

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
            params = {p for group in given.param_groups for p in group["params"]}
            others = (p for p in self.setting.model.parameters() if p not in params)
            if any(p.is_floating_point() and p.itemsize > 2 for p in others):
                self.notes.append(
                    "bf16: the weights that the optimizer lacks are rounded as well, but for "
                    "norms, and undo() does not give back the bits that they lose"
                )

    def _add(self, given: torch.optim.Optimizer, kind: str, master: str | None) -> None:
        weights = "given" if master is None else "bf16"
        try:
            self.optimizers[kind, weights] = replacement(given, kind, master)
        except (TypeError, ValueError, RuntimeError) as error:
            self.notes.append(f"{kind}: {error}")

    def only_whole_batches(self) -> tuple[int, ...]:
        """Takes back micro-batches, whose loss is not that of the batch, and returns how many there
        might have been.

        Raises:
            ValueError: ``only`` wants no whole batches.
        """
        self.notes.append(f"micro-batches: {NO_RULE}")
        if 1 not in self.micro_batches:
            self._refuse(("micro_batches",), "1 among them")
        gone, self.micro_batches = self.micro_batches[1:], (1,)
        return gone

    def optimizer_of(self, choice: Choice) -> torch.optim.Optimizer:
        """Returns the optimizer of a choice."""
        return self.optimizers[choice.optimizer, choice.weights]

    def obstacle(self, choice: Choice) -> str | None:
        """Returns why a choice, whatever its levels, cannot be for this model, or None."""
        made = self.optimizers.get((choice.optimizer, choice.weights))
        if made is None:
            return (
                f"has optimizer {choice.optimizer} with weights {choice.weights}, wanted one of "
                f"{self._pairs()}{self._reasons()}"
            )
        possible = {
            "micro_batches": self.micro_batches,
            "fused_loss": self.fused_losses,
            "release": self.only.get("release", (False, True)),
        }
        for name, values in possible.items():
            if (got := getattr(choice, name)) not in values:
                wanted = ", ".join(map(str, values))
                return f"has {name}={got}, wanted one of {wanted}{self._reasons()}"
        if choice.release and not self.can_release(choice, made):
            return "releases gradients, which this loop or this optimizer needs together"
        return None

    def choices(self, micro_batches: int = 1) -> Iterator[Choice]:
        """Yields all choices with this number of micro-batches, without levels."""
        for (optimizer, weights), made in self.optimizers.items():
            for fused_loss in self.fused_losses:
                base = Choice((), micro_batches, optimizer, weights, False, fused_loss)
                if False in self.only.get("release", (False,)):
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
