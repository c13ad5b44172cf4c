"""What to say where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .._core.sizes import format_bytes
from ..planning.errors import PlanError
from .errors import DoesNotFit
from .families import Families
from .replacing import is_headroom, state_bytes
from .search import Search
from .techniques import ALLOWABLE, Choice, Techniques

__all__ = ["does_not_fit"]


def does_not_fit(
    search: Search, budget: int, within: int, given: Any, allowed: Sequence[str]
) -> DoesNotFit:
    """Returns the error that says which floor was hit, and what would help.

    Args:
        budget: that was asked for.
        within: what is left of it beside the margin.
        given: the optimizer as it was given.
        allowed: what was allowed.
    """
    choice, plan = search.leanest()
    least, kinds = plan.total_bytes, plan.peak_by_kind
    most = sorted(((size, name) for name, size in kinds.items() if size), reverse=True)
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in most)
    if plan.device_share.bytes:
        parts += f", the device {format_bytes(plan.device_share.bytes)}"
    needed = least + budget - within + least // 100  # with its margin
    advice = [f"a budget of {format_bytes(needed)}", *_allowing(search, within, given, allowed)]
    notes = [*search.families.techniques.notes, *search.families.notes]
    reasons = f" ({'; '.join(notes)})" if notes else ""
    return DoesNotFit(
        f"nothing trains the model within {format_bytes(budget)}, of which "
        f"{format_bytes(budget - within)} is left free: the leanest choice takes "
        f"{format_bytes(least)} ({_words(choice)}), of which {parts}. What would fit: "
        f"{', or '.join(advice)}{reasons}",
        least,
        kinds,
    )


def _words(choice: Choice) -> str:
    words = [f"all {len(choice.levels)} blocks at their leanest"] if choice.levels else []
    words += [f"{choice.micro_batches} micro-batches"] if choice.micro_batches > 1 else []
    words += [] if choice.optimizer == "given" else [f"optimizer {choice.optimizer}"]
    words += [] if choice.weights == "given" else [f"weights {choice.weights}"]
    words += ["gradients released"] if choice.release else []
    words += ["the fused loss"] if choice.fused_loss else []
    return ", ".join(words) or "as given"


def _allowing(search: Search, within: int, given: Any, allowed: Sequence[str]) -> Iterator[str]:
    """Yields what to allow, or which batch to take, each by a plan that fits."""
    for names in _sets(allowed):
        own = search.families
        techniques = Techniques.of(
            own.setting, given, names, own.max_grad_norm, own.techniques.only
        )
        if _fits(own, techniques, within):
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


def _fits(families: Families, techniques: Techniques, within: int) -> bool:
    """Whether a step at the leanest levels fits, by plans alone."""
    for key, optimizer in techniques.optimizers.items():
        if _least(families, optimizer, key[1]) > within:
            continue
        choice = Choice((), 1, *key, fused_loss=techniques.fused_losses[-1])
        choices = [choice.but(micro_batches=techniques.micro_batches[-1])]
        if techniques.can_release(choice, optimizer):
            choices.append(choice.but(release=True))
        for each in choices:
            try:
                if families.planned_leanest(each, optimizer).total_bytes <= within:
                    return True
            except PlanError:
                continue
    return False


def _least(families: Families, optimizer: Any, weights: str) -> int:
    """Fewer bytes than a step takes: those of the weights and of the optimizer's state."""
    model = families.setting.model
    size = sum(p.nbytes for p in model.parameters()) // (2 if weights == "bf16" else 1)
    return size + (state_bytes(optimizer) if is_headroom(optimizer) else 0)
