"""What can be chosen for a model: optimizers, weights, release, the fused loss, micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...optim import Adam8bit
from ...patching.losses import has_fused_loss, knows_loss
from ...step.description import Step
from ...step.micro_batches import samples_of
from ..choice import ALLOWABLE, Choice
from .optimizers import is_headroom, obstacle, replacement

__all__ = ["Techniques", "techniques_of"]

Optimizers = Mapping[tuple[str, str], torch.optim.Optimizer]


@dataclass(frozen=True)
class Techniques:
    """What can be chosen for a model, besides levels.

    Attributes:
        step: that is made, with the optimizer of the loop, which may be none of those that can be
            chosen.
        allowed: what changes the mathematics, and may.
        optimizers: by the fields ``optimizer`` and ``weights`` of a choice.
        fused_losses: the values that ``fused_loss`` can have.
        micro_batches: the values that ``micro_batches`` can have.
        only: the values that fields of a choice may have in the loop that trains; a field that is
            not there may have any.
        parts_add_up: whether the loop itself sees to it that the losses of parts of a batch add up,
            so that they are not compared with the loss of the batch.
        notes: why something cannot be chosen.
    """

    step: Step
    allowed: tuple[str, ...]
    optimizers: Optimizers
    fused_losses: tuple[bool, ...] = (False,)
    micro_batches: tuple[int, ...] = (1,)
    only: Mapping[str, Collection[Any]] = field(default_factory=dict)
    parts_add_up: bool = False
    notes: tuple[str, ...] = ()

    def whole_batches(self, reason: str) -> Techniques:
        """Returns the techniques without micro-batches, and with the reason as a note.

        Raises:
            ValueError: ``only`` wants no whole batches.
        """
        found = replace(self, notes=(*self.notes, f"micro-batches: {reason}"))
        if 1 not in self.micro_batches:
            raise found.refusal(("micro_batches",), "1 among them")
        return replace(found, micro_batches=(1,))

    def refusal(self, names: Sequence[str], wanted: str) -> ValueError:
        """Returns the error that says that ``only`` leaves no value of these fields."""
        given = ", ".join(
            f"{name}={tuple(self.only[name])!r}" for name in names if name in self.only
        )
        return ValueError(f"only has {given}, wanted {wanted}{self._reasons()}")

    @property
    def pairs(self) -> str:
        """Returns the optimizers that can be chosen, in words."""
        return ", ".join(
            f"optimizer {kind} with weights {weights}" for kind, weights in self.optimizers
        )

    def _reasons(self) -> str:
        return "".join(f"; {note}" for note in self.notes)

    def optimizer_of(self, choice: Choice) -> torch.optim.Optimizer:
        """Returns the optimizer of a choice."""
        return self.optimizers[choice.optimizer, choice.weights]

    def obstacle(self, choice: Choice) -> str | None:
        """Returns why a choice, whatever its levels, cannot be for this model, or None."""
        made = self.optimizers.get((choice.optimizer, choice.weights))
        if made is None:
            return (
                f"has optimizer {choice.optimizer} with weights {choice.weights}, wanted one of "
                f"{self.pairs}{self._reasons()}"
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

    def choices(self) -> Iterator[Choice]:
        """Yields all choices, without levels, those with the fewest micro-batches first."""
        for count in self.micro_batches:
            for (optimizer, weights), made in self.optimizers.items():
                for fused_loss in self.fused_losses:
                    base = Choice((), count, optimizer, weights, False, fused_loss)
                    if False in self.only.get("release", (False,)):
                        yield base
                    if self.can_release(base, made):
                        yield base.but(release=True)

    def can_release(self, choice: Choice, optimizer: Any) -> bool:
        """Returns whether gradients can be released: a step that is made within the backward pass
        can neither clip nor wait for other micro-batches, nor be skipped as a whole."""
        if not is_headroom(optimizer) or self.clips or self.step.scaler:
            return False
        if True not in self.only.get("release", (True,)):
            return False
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = (p for p in self.step.model.parameters() if p.requires_grad)
        return choice.micro_batches == 1 and all(id(p) in own for p in trained)

    @property
    def clips(self) -> bool:
        """Returns whether something clips the gradients of a step."""
        limits = [group.get("max_grad_norm") for group in self.step.optimizer.param_groups]
        return any(limit is not None for limit in (self.step.max_grad_norm, *limits))


def techniques_of(
    step: Step,
    allow: Collection[str] = (),
    only: Mapping[str, Collection[Any]] | None = None,
    parts_add_up: bool = False,
) -> Techniques:
    """Returns the techniques for a step, whose optimizer is made.

    Raises:
        ValueError: ``only`` leaves no value of a field.
    """
    optimizers, notes = _optimizers(step, allow)
    fused_losses = (False,)
    if has_fused_loss(step.model):
        fused_losses = (True,)  # as the user wants it
    elif step.loss is None and knows_loss(step.model):
        fused_losses = (False, True)
    micro_batches = (1,)
    if mixes_samples(step.model):
        notes.append(
            "micro-batches: not with a BatchNorm in training, whose statistics are over the whole "
            "batch"
        )
    else:
        micro_batches = (1, *counts(samples_of(step.batch)))
    every = Techniques(
        step, tuple(allow), optimizers, fused_losses, micro_batches, only or {}, parts_add_up,
        tuple(notes),
    )  # fmt: skip
    return _limited(every)


def counts(samples: int | None) -> Iterator[int]:
    """Yields the numbers of micro-batches to look at: of those that divide the samples, the first
    from each power of two on, up to 64."""
    last = 1
    for power in range(1, 7):
        fitting = (n for n in range(2**power, 2 ** (power + 1)) if samples and samples % n == 0)
        count = next(fitting, last)
        if count > last:
            yield count
            last = count


def mixes_samples(model: nn.Module) -> bool:
    """Returns whether a step of the whole batch is another than that of its parts, because a
    BatchNorm takes statistics over the batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def _optimizers(step: Step, allow: Collection[str]) -> tuple[Optimizers, list[str]]:
    """Returns the optimizers that may be, and why others may not."""
    given: torch.optim.Optimizer = step.optimizer
    found, notes = {("given", "given"): given}, []
    if (reason := obstacle(given)) is not None:
        if allow or not is_headroom(given):
            notes.append(f"the optimizer stays as it is: {reason}")
        return found, notes
    kinds = [] if is_headroom(given) else ["headroom"]
    kinds += ["8bit"] if "8bit" in allow and not isinstance(given, Adam8bit) else []
    kinds += ["adafactor"] if "adafactor" in allow else []
    pairs = [(kind, "given") for kind in kinds]
    params = {p for group in given.param_groups for p in group["params"]}
    if "bf16" in allow and any(p.dtype != torch.float32 for p in params):
        notes.append("bf16: not all parameters of the optimizer are float32")
    elif "bf16" in allow and (step.scaler or step.amp == torch.float16):
        notes.append("bf16: not with float16 or a scaler of losses")
    elif "bf16" in allow:
        own = "8bit" if isinstance(given, Adam8bit) else "headroom"
        pairs += [(kind, "bf16") for kind in dict.fromkeys((own, *kinds))]
        others = (p for p in step.model.parameters() if p not in params)
        if any(p.is_floating_point() and p.itemsize > 2 for p in others):
            notes.append(
                "bf16: the weights that the optimizer lacks are rounded as well, but for norms, "
                "and undo() does not give back the bits that they lose"
            )
    for kind, weights in pairs:
        master = "remainder16" if weights == "bf16" else None
        try:
            found[kind, weights] = replacement(given, kind, master)
        except (TypeError, ValueError, RuntimeError) as error:
            notes.append(f"{kind}: {error}")
    return found, notes


def _limited(every: Techniques) -> Techniques:
    """Returns what ``only`` leaves.

    Raises:
        ValueError: a field has no value that is possible.
    """
    only = every.only
    optimizers = {
        (kind, weights): optimizer
        for (kind, weights), optimizer in every.optimizers.items()
        if kind in only.get("optimizer", (kind,)) and weights in only.get("weights", (weights,))
    }
    if not optimizers:
        asked = {*only.get("optimizer", ()), *only.get("weights", ())}
        missing = [name for name in ALLOWABLE if name in asked - {*every.allowed}]
        hint = "".join(f'; "{name}" is not in allow' for name in missing)
        raise every.refusal(("optimizer", "weights"), f"one of {every.pairs}{hint}")
    fused_losses = tuple(x for x in every.fused_losses if x in only.get("fused_loss", (x,)))
    if not fused_losses:
        possible = ", ".join(map(str, every.fused_losses))
        raise every.refusal(("fused_loss",), f"one of {possible}")
    found = replace(
        every,
        optimizers=optimizers,
        fused_losses=fused_losses,
        micro_batches=_micro_batches(every),
    )
    if False in only.get("release", (False,)):
        return found
    releasing = {
        key: made
        for key, made in optimizers.items()
        if found.can_release(Choice((), 1, *key), made)
    }
    if not releasing or 1 not in found.micro_batches:
        raise found.refusal(
            ("release", "optimizer", "weights", "micro_batches"),
            "False in release as well: gradients can be released only where nothing clips or "
            "scales them, by an optimizer of Headroom's that has all parameters that are trained, "
            "in one micro-batch",
        )
    return replace(found, optimizers=releasing, micro_batches=(1,))


def _micro_batches(every: Techniques) -> tuple[int, ...]:
    """Returns the numbers of micro-batches that ``only`` leaves. Where samples are mixed, it is the
    least of a loop that weighs the losses itself, which makes so many anyway.

    Raises:
        ValueError: there is none.
    """
    if "micro_batches" not in every.only:
        return every.micro_batches
    samples = samples_of(every.step.batch) or 1
    found = tuple(n for n in sorted(set(every.only["micro_batches"])) if samples % n == 0)
    wanted = f"numbers that divide the {samples} samples of the batch"
    if mixes_samples(every.step.model):
        found = found[:1]
        if not every.parts_add_up and found != (1,):
            found, wanted = (), "1 among them"
    if not found:
        raise every.refusal(("micro_batches",), wanted)
    return found
