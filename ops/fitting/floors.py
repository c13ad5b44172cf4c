"""What to say where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from .._core.sizes import format_bytes
from ..planning.result import Plan
from ..step.errors import PlanError
from .choice import ALLOWABLE, Choice
from .errors import DoesNotFit
from .micro_batches import samples_of
from .replacing import is_headroom, state_bytes
from .search import Search
from .techniques import Techniques

__all__ = ["allowing", "does_not_fit", "held_at_least", "listed", "most_samples", "words"]

SMALLER = 8  # plans at most of smaller batches

Planned = Callable[[Choice, Any], Plan]  # of a choice and its optimizer


def does_not_fit(search: Search, budget: int, within: int) -> DoesNotFit:
    """Returns the error that says which floor was hit, and what would help.

    Args:
        budget: that was asked for.
        within: what is left of it beside the margin.
    """
    choice, plan = search.leanest()
    least, kinds = plan.total_bytes, plan.peak_by_kind
    families = search.families
    parts = listed(kinds)
    if plan.device_share.bytes:
        parts += f", the device {format_bytes(plan.device_share.bytes)}"
    needed = least + budget - within + least // 100  # with its margin
    advice = [
        f"a budget of {format_bytes(needed)}",
        *allowing(families.techniques, families.planned_with, plan, within),
    ]
    samples = most_samples(search, within)
    if samples is not None:
        given = samples_of(families.setting.batch)
        advice.append(f"a batch of {samples} samples, not {given}")
    notes = [*families.techniques.notes, *families.notes]
    reasons = f" ({'; '.join(notes)})" if notes else ""
    return DoesNotFit(
        f"nothing trains the model within {format_bytes(budget)}, of which "
        f"{format_bytes(budget - within)} is left free: the leanest choice takes "
        f"{format_bytes(least)} ({words(choice)}), of which {parts}. What would fit: "
        f"{', or '.join(advice)}{reasons}",
        least,
        kinds,
        samples,
    )


def listed(kinds: Mapping[str, int]) -> str:
    """Returns bytes by kind as text, the most first."""
    most = sorted(((size, name) for name, size in kinds.items() if size), reverse=True)
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in most)


def words(choice: Choice) -> str:
    """Returns a leanest choice in words."""
    found = [f"all {len(choice.levels)} blocks at their leanest"] if choice.levels else []
    found += [f"{choice.micro_batches} micro-batches"] if choice.micro_batches > 1 else []
    found += [] if choice.optimizer == "given" else [f"optimizer {choice.optimizer}"]
    found += [] if choice.weights == "given" else [f"weights {choice.weights}"]
    found += ["gradients released"] if choice.release else []
    found += ["the fused loss"] if choice.fused_loss else []
    return ", ".join(found) or "as given"


def allowing(now: Techniques, planned: Planned, leanest: Plan, within: int) -> Iterator[str]:
    """Yields what to allow, by a plan that fits.

    Args:
        now: what is allowed.
        planned: returns the plan of a choice without levels, at the leanest ones.
        leanest: the plan of the leanest choice of what is allowed.
    """
    kinds = leanest.peak_by_kind
    moved = sum(kinds[kind] for kind in ("optimizer_state", "master_weights", "gradients"))
    tried = {*now.optimizers}
    for names in _sets(now.allowed):
        if "bf16" not in names and leanest.total_bytes - moved > within:
            continue  # another optimizer leaves the rest of the peak as it is
        more = Techniques.of(
            now.setting, now.given, names, now.max_grad_norm, now.only, now.parts_add_up
        )
        more.optimizers = {k: made for k, made in more.optimizers.items() if k not in tried}
        tried |= {*more.optimizers}
        more.micro_batches = now.micro_batches  # of which some may be known not to be possible
        if _fits(more, planned, within):
            shown = ", ".join(f'"{name}"' for name in names)
            yield f"allow=({shown}{',' if len(names) == 1 else ''})"
            return


def _sets(allowed: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The allowances that are more than what is allowed, fewer first."""
    more = [name for name in ALLOWABLE if name not in allowed]
    for name in more:
        yield (*allowed, name)
    if len(more) > 1:
        for name in ("8bit", "adafactor"):
            if name in more and "bf16" in more:
                yield (*allowed, name, "bf16")


def _fits(techniques: Techniques, planned: Planned, within: int) -> bool:
    """Whether a step at the leanest levels fits, by plans alone."""
    for key, optimizer in techniques.optimizers.items():
        if held_at_least(techniques.setting.model, optimizer, key[1]) > within:
            continue
        choice = Choice((), 1, *key, fused_loss=techniques.fused_losses[-1])
        for each in (
            choice.but(micro_batches=techniques.micro_batches[-1]),
            choice.but(release=True),
        ):
            if techniques.obstacle(each) is not None:
                continue
            try:
                if planned(each, optimizer).total_bytes <= within:
                    return True
            except PlanError:
                continue
    return False


def held_at_least(model: nn.Module, optimizer: Any, weights: str) -> int:
    """Returns a lower bound of the bytes of a step in which each parameter gets a gradient: those
    of the weights and of the optimizer's state, as far as it says what that will be."""
    size = sum(p.nbytes for p in model.parameters()) // (2 if weights == "bf16" else 1)
    return size + (state_bytes(optimizer) if is_headroom(optimizer) else 0)


def most_samples(search: Search, within: int) -> int | None:
    """Returns the most samples of a smaller batch with which a step fits, by plans at the leanest
    levels, or None. Bytes are almost a line over samples, so that a few plans find it."""
    families, techniques = search.families, search.families.techniques
    unit = techniques.micro_batches[0]  # what a loop makes anyway
    whole = (samples_of(techniques.setting.batch) or 0) // unit
    own = [outer for outer in search.every() if outer.choice.micro_batches == unit]
    if not own:
        return None
    leanest = min(own, key=lambda outer: outer.points[0].peak)
    optimizer = techniques.optimizer_of(leanest.choice)
    releases = techniques.can_release(leanest.choice, optimizer)
    choice = leanest.choice_of(leanest.points[0]).but(release=releases)

    def size(units: int) -> int | None:
        try:
            return families.planned_with(choice, optimizer, units * unit).total_bytes
        except PlanError:  # such as of a BatchNorm, which takes no single sample
            return None

    first = ((units, found) for units in (1, 2) if units < whole and (found := size(units)))
    low, least = next(first, (0, within + 1))
    if least > within:
        return None
    high, most = whole, max(leanest.points[0].peak, within + 1)
    for number in range(SMALLER):
        if high - low < 2:
            break
        middle = (low + high) // 2
        if number < SMALLER // 2:
            middle = low + (high - low) * (within - least) // (most - least)
            middle = min(max(middle, low + 1), high - 1)
        found = size(middle)
        if found is not None and found <= within:
            low, least = middle, found
        else:
            high, most = middle, max(found or 0, within + 1)
    return low * unit
