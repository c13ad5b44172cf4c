"""Refuses a budget that is below what every choice holds, by plans: nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from .._core.sizes import format_bytes
from ..planning.api import made
from ..planning.result import Plan
from ..step.errors import PlanError
from ..step.out_of_memory import is_out_of_memory
from .blocks import Blocks
from .candidates import setup_of
from .choice import Choice
from .errors import DoesNotFit
from .families import Families
from .floors import allowing, held_at_least, listed, words
from .replacing import is_headroom, state_bytes
from .techniques import Techniques

__all__ = ["below_every_choice"]

STANDING = ("parameters", "buffers", "optimizer_state", "master_weights")
"""The kinds of bytes that are live throughout a step, once there has been one. The batch is one of
them, but a smaller one might fit."""

LEANEST = 3  # choices that are planned in micro-batches as well


class _Floor(NamedTuple):
    """What no choice with an optimizer is without.

    Attributes:
        choice: a lean one with this optimizer.
        plan: of that choice.
        held: bytes by kind that are live at once with whatever levels, micro-batches and loss.
    """

    choice: Choice
    plan: Plan
    held: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.held.values())


def below_every_choice(families: Families, budget: int, within: int) -> DoesNotFit | None:
    """Returns the error that says what every choice holds, if that is above the budget, or None.

    A plan is made only where a sum of sizes says that this may be so. Parameters that get no
    gradient have no state, which only a plan tells.

    Args:
        families: of the model, which have measured nothing yet.
        budget: that was asked for.
        within: what is left of it beside the margin.
    """
    techniques = families.techniques
    expected = {key: _expected(techniques, key) for key in techniques.optimizers}
    if min(expected.values()) <= within:
        return None
    floors = []
    try:
        for key in sorted(expected, key=lambda key: expected[key]):
            floors.append(_floor(techniques, key))
            if floors[-1].bytes <= within:
                return None
    except PlanError:  # the search says why, if it is of every choice
        return None
    if not _may_agree(families):
        techniques.only_whole_batches()
    lowest = min(floors, key=lambda floor: floor.bytes)
    choice, plan = _leanest(techniques, floors)
    least = plan.total_bytes
    needed = least + budget - within + least // 100  # with its margin
    advice = [
        f"a budget of {format_bytes(needed)} ({words(choice)})",
        *allowing(techniques, partial(_plan, techniques), plan, within),
    ]
    reasons = f" ({'; '.join(techniques.notes)})" if techniques.notes else ""
    return DoesNotFit(
        f"nothing trains the model within {format_bytes(budget)}, of which "
        f"{format_bytes(budget - within)} is left free: whatever is chosen, a step holds "
        f"{format_bytes(lowest.bytes)} besides activations and the batch: {listed(lowest.held)}. "
        f"What would fit: {', or '.join(advice)}{reasons}",
        least,
        plan.peak_by_kind,
    )


def _may_agree(families: Families) -> bool:
    """Whether gradients of parts add up, by passes of some samples. If these take more memory
    than there is, they may, and a note says that it is not known."""
    try:
        return families.parts_agree()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    families.techniques.notes.append(
        "micro-batches: there is too little memory to see whether the gradients of parts of a "
        "batch add up to the gradient of the batch"
    )
    return True


def _expected(techniques: Techniques, key: tuple[str, str]) -> int:
    """The bytes of a floor where each parameter gets a gradient."""
    optimizer, model = techniques.optimizers[key], techniques.setting.model
    size = held_at_least(model, optimizer, key[1])
    twin = techniques.optimizers.get(("headroom", key[1]))
    if twin is not None and not is_headroom(optimizer):
        size += state_bytes(twin)  # which has as much
    if not techniques.can_release(_choice(techniques, key), optimizer):
        size += sum(p.nbytes for p in model.parameters() if p.requires_grad) // (
            2 if key[1] == "bf16" else 1
        )
    return size


def _choice(techniques: Techniques, key: tuple[str, str]) -> Choice:
    levels = tuple(Blocks(techniques.setting.model).leanest.values())
    fused = techniques.fused_losses[-1]
    return Choice(levels, techniques.micro_batches[0], *key, fused_loss=fused)


def _floor(techniques: Techniques, key: tuple[str, str]) -> _Floor:
    optimizer = techniques.optimizers[key]
    choice = _choice(techniques, key)
    choice = choice.but(release=techniques.can_release(choice, optimizer))
    plan = _plan(techniques, choice, optimizer)
    timeline = plan.timeline
    kinds, phase = STANDING, "forward"
    if not choice.release:  # others are gone before the next one arrives; these wait for the step
        kinds, phase = (*STANDING, "gradients"), "optimizer"
    found = timeline.by_kind(max(span.start for span in timeline.spans if span.phase == phase))
    return _Floor(choice, plan, {kind: found[kind] for kind in kinds})


def _leanest(techniques: Techniques, floors: Sequence[_Floor]) -> tuple[Choice, Plan]:
    """The leanest choice of those that were planned, and of these in as many micro-batches as there
    may be."""
    found = [(floor.choice, floor.plan) for floor in floors]
    most = techniques.micro_batches[-1]
    for choice, _ in sorted(found, key=_bytes)[:LEANEST]:
        if most > choice.micro_batches:
            parted = choice.but(micro_batches=most, release=False)
            with suppress(PlanError):
                found.append((parted, _plan(techniques, parted, techniques.optimizer_of(parted))))
    return min(found, key=_bytes)


def _bytes(planned: tuple[Choice, Plan]) -> int:
    return planned[1].total_bytes


def _plan(techniques: Techniques, choice: Choice, optimizer: Any) -> Plan:
    """The plan of a choice at the leanest levels."""
    leanest = Blocks(techniques.setting.model).leanest
    choice = choice.but(levels=tuple(leanest.values()))
    names, norm = list(leanest), techniques.max_grad_norm
    return made(setup_of(techniques.setting, choice, names, optimizer, norm))
