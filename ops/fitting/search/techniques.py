"""Finds the techniques that can be chosen for a model: optimizers, weights, release, the fused
loss, micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from ...host.arena import default_arena
from ...host.engines import engine_of
from ...param_states.paging import planned_paging
from ...patching.levels import Blocks
from ...patching.losses import has_fused_loss, kept_loss, knows_loss
from ...quantizing.frozen import frozen_layers
from ...step.description import Step
from ...step.micro_batches import can_cut, counts, mixes_samples
from ...step.optimizers import can_offload, counterparts, is_headroom, obstacle, replacement
from ..choice import ALLOWABLE, FORMATS, Choice

ON_HOST = ("offload", "state_budget", "weights_host")
FIELDS = ("optimizer", "weights", "frozen", "fused_loss", "micro_batches", "release", *ON_HOST)
SHARES = (0.25, 0.5, 0.75)  # of a state on the host, which may stay on the device, or of blocks

Optimizers = Mapping[tuple[str, str], torch.optim.Optimizer]


@dataclass(frozen=True)
class Techniques:
    """The techniques that can be chosen for a model, besides levels.

    Attributes:
        step: that is made, with the optimizer of the loop, which may be none of those that can be
            chosen.
        allowed: what changes the mathematics, and may.
        optimizers: by the fields ``optimizer`` and ``weights`` of a choice.
        choices: all that are possible, without levels, those with the fewest micro-batches first.
        only: the values that fields of a choice may have in the loop that trains; a field that is
            not there may have any.
        parts_add_up: whether the loop itself sees to it that the losses of parts of a batch add up,
            so that they are not compared with the loss of the batch.
        on_host: whether the host may hold what the device has no room for.
        notes: why something cannot be chosen.
        layers: the names of those whose frozen weights can be in few bits.
    """

    step: Step
    allowed: tuple[str, ...]
    optimizers: Optimizers
    choices: tuple[Choice, ...]
    only: Mapping[str, Collection[Any]] = field(default_factory=dict)
    parts_add_up: bool = False
    on_host: bool = False
    notes: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Returns the numbers of micro-batches that can be chosen, the fewest first."""
        return tuple(dict.fromkeys(choice.micro_batches for choice in self.choices))

    @property
    def fused_losses(self) -> tuple[bool, ...]:
        """Returns the values that ``fused_loss`` can have, that of the model as it is first."""
        return tuple(dict.fromkeys(choice.fused_loss for choice in self.choices))

    @property
    def formats(self) -> tuple[str, ...]:
        """Returns the values that ``frozen`` can have, in the order in which they are looked at:
        that which changes the weights the least first."""
        found = {choice.frozen for choice in self.choices}
        return tuple(each for each in ("given", *FORMATS) if each in found)

    def optimizer_of(self, choice: Choice) -> torch.optim.Optimizer:
        """Returns the optimizer of a choice."""
        return self.optimizers[choice.optimizer, choice.weights]

    def whole_batches(self, reason: str) -> Techniques:
        """Returns the techniques without micro-batches, and with the reason as a note.

        Raises:
            ValueError: ``only`` wants no whole batches.
        """
        found = replace(self, notes=(*self.notes, f"micro-batches: {reason}"))
        whole = tuple(choice for choice in self.choices if choice.micro_batches == 1)
        if not whole:
            raise found.refusal("micro_batches", (1,))
        return replace(found, choices=whole)

    def obstacle(self, choice: Choice) -> str | None:
        """Returns why a choice, whatever its levels, cannot be for this model, or None."""
        left: Sequence[Choice] = self.choices
        for name in FIELDS:
            got, possible = getattr(choice, name), _values(left, name)
            if got not in possible:
                return f"has {name}={got!r}, wanted {_one_of(possible)}{self._reasons()}"
            left = [each for each in left if getattr(each, name) == got]
        return None

    def refusal(self, name: str, possible: Collection[Any]) -> ValueError:
        """Returns the error that says that ``only`` leaves no value of a field."""
        given = ", ".join(f"{key}={tuple(values)!r}" for key, values in self.only.items())
        missing = {*self.only[name]} & {*ALLOWABLE} - {*self.allowed}
        hint = "".join(f'; "{missed}" is not in allow' for missed in sorted(missing))
        if name == "release":
            hint = (
                ": gradients can be released only where nothing clips or scales them, by an "
                "optimizer of Headroom's that has all parameters that are trained, in one "
                "micro-batch"
            )
        wanted = f"{_one_of(possible)} for {name}{hint}"
        return ValueError(f"only has {given}, wanted {wanted}{self._reasons()}")

    def _reasons(self) -> str:
        return "".join(f"; {note}" for note in self.notes)


def _values(choices: Sequence[Choice], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(choice, name) for choice in choices))


def _one_of(values: Collection[Any]) -> str:
    return f"one of {', '.join(str(value) or repr(value) for value in values)}"


def techniques_of(
    step: Step,
    allow: Collection[str] = (),
    only: Mapping[str, Collection[Any]] | None = None,
    parts_add_up: bool = False,
    on_host: bool = False,
    given: Choice | None = None,
) -> Techniques:
    """Returns the techniques for a step, whose optimizer is made.

    Args:
        given: a choice, whose state on the host is one of the techniques.

    Raises:
        ValueError: ``only`` leaves no value of a field.
    """
    only = only or {}
    optimizers, notes = _optimizers(step, allow)
    formats, layers = [name for name in FORMATS if name in allow], []
    if formats:
        layers, reason = frozen_layers(step.model, step.optimizer)
        notes += [f"{', '.join(formats)}: {reason}"] * (reason is not None)
    fused_losses: tuple[bool, ...] = (False,)
    if has_fused_loss(step.model):
        fused_losses = (True,)  # as the user wants it
    elif step.loss is None and knows_loss(step.model):
        fused_losses = (False, True)
    elif step.loss is not None or True not in only.get("fused_loss", (True,)):
        pass
    elif (own := kept_loss(step.model)) is not None:
        notes.append(f"the loss makes logits, because it is the model's own: {own}")
    asked = sorted(n for n in {*only.get("micro_batches", ())} if can_cut(step.batch, n))
    numbers = asked or [1, *counts(step.batch)]
    if mixes_samples(step.model):
        notes.append(
            "micro-batches: not with a BatchNorm in training, whose statistics are over the whole "
            "batch"
        )
        numbers = numbers[:1] if parts_add_up else [1]  # a loop makes so many anyway
    choices = []
    for count, (key, optimizer), fused_loss in product(numbers, optimizers.items(), fused_losses):
        choice = Choice((), count, *key, fused_loss=fused_loss)
        choices.append(choice)
        if count == 1 and _can_release(step, optimizer):
            choices.append(choice.but(release=True))
    places = {
        key: _places_of_state(optimizer, step.device, on_host, given)
        for key, optimizer in optimizers.items()
    }
    choices += [
        choice.but(offload=place, state_budget=budget)
        for choice in choices
        for place, budget in places[choice.optimizer, choice.weights]
    ]
    choices += [
        choice.but(weights_host=count)
        for choice in choices
        for count in _counts_streamed(step, on_host, given)
        if not choice.state_budget  # whose room weights would take
    ]
    choices += [choice.but(frozen=each) for each in formats if layers for choice in choices]
    choices.sort(key=lambda choice: choice.micro_batches)
    every = Techniques(
        step, tuple(allow), optimizers, tuple(choices), only, parts_add_up, on_host, tuple(notes),
        tuple(layers),
    )  # fmt: skip
    left = choices
    for name in FIELDS:
        if name in only:
            possible = _values(left, name)
            left = [choice for choice in left if getattr(choice, name) in only[name]]
            if not left:
                raise every.refusal(name, possible)
    keys = {(choice.optimizer, choice.weights) for choice in left}
    optimizers = {key: optimizer for key, optimizer in optimizers.items() if key in keys}
    return replace(every, optimizers=optimizers, choices=tuple(left))


def _places_of_state(
    optimizer: Any, device: torch.device | None, on_host: bool, given: Choice | None
) -> list[tuple[str, int]]:
    """Returns how a state can lie on the host: what happens there, and how many bytes of it may
    stay on the device, with those of the ring."""
    found = [(given.offload, given.state_budget)] if given is not None and given.offload else []
    if not (on_host or found) or not can_offload(optimizer):
        return []
    assert device is not None
    if on_host:
        memory = planned_paging(optimizer, 0)
        shares = (memory.ring + round(share * memory.host) for share in SHARES)
        budgets = [0, *(size for size in shares if planned_paging(optimizer, size).host)]
        found += [("state", budget) for budget in budgets]
        if engine_of(device).is_asynchronous:
            found.append(("step", 0))  # elsewhere the host is the device
    return list(dict.fromkeys(found))


def _counts_streamed(step: Step, on_host: bool, given: Choice | None) -> list[int]:
    """Returns of how many blocks the weights can lie on the host. On a CPU, where host and device
    are one, that is worth it if the arena is in a file."""
    found = [given.weights_host] if given is not None and given.weights_host else []
    device = step.device
    assert device is not None
    if on_host and (engine_of(device).is_asynchronous or default_arena().file is not None):
        blocks = len(Blocks(step.model).names)
        found += [round(share * blocks) for share in (*SHARES, 1)]
    return [count for count in dict.fromkeys(found) if count > 0]


def _can_release(step: Step, optimizer: Any) -> bool:
    """Returns whether gradients can be released: a step that is made within the backward pass can
    neither clip nor wait for other micro-batches, nor be skipped as a whole."""
    limits = [group.get("max_grad_norm") for group in optimizer.param_groups]
    clips = any(limit is not None for limit in (step.max_grad_norm, *limits))
    if not is_headroom(optimizer) or clips or step.scaler:
        return False
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in own for p in step.model.parameters() if p.requires_grad)


def _optimizers(step: Step, allow: Collection[str]) -> tuple[Optimizers, list[str]]:
    """Returns the optimizers that may be, and why others may not."""
    given: torch.optim.Optimizer = step.optimizer
    found, notes = {("given", "given"): given}, []
    if (reason := obstacle(given)) is not None:
        if allow or not is_headroom(given):
            notes.append(f"the optimizer stays as it is: {reason}")
        return found, notes
    classes = counterparts(type(given))
    kinds = [] if is_headroom(given) else ["headroom"]
    is_8bit = type(given) is classes["8bit"]
    kinds += ["8bit"] if "8bit" in allow and not is_8bit else []
    kinds += ["adafactor"] if "adafactor" in allow and "adafactor" in classes else []
    pairs = [(kind, "given") for kind in kinds]
    params = {p for group in given.param_groups for p in group["params"]}
    if "bf16" in allow and any(p.dtype != torch.float32 for p in params):
        notes.append("bf16: not all parameters of the optimizer are float32")
    elif "bf16" in allow and (step.scaler or step.amp == torch.float16):
        notes.append("bf16: not with float16 or a scaler of losses")
    elif "bf16" in allow:
        own = "8bit" if is_8bit else "headroom"
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
