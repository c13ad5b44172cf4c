"""Says why nothing fits, and what would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..._core.sizes import format_bytes
from ...planning.api import plan_of
from ...planning.fine_tuning import adapters_instead
from ...planning.result import Plan
from ...step.errors import PlanError
from ...step.micro_batches import samples_of
from ...techniques import TECHNIQUES
from ...techniques.frozen import Frozen
from ...techniques.optimizer import ReplacedOptimizer
from ...techniques.technique import allowable
from ..choice import Choice
from ..costs.outline import evaluation_of
from .candidate import Candidate
from .candidates import Candidates
from .techniques import Techniques, techniques_of

SMALLER = 8  # plans at most of smaller batches


class DoesNotFit(ValueError):
    """No choice trains the model within the budget. Says which floor was hit and what would help.

    Attributes:
        least: the bytes that the leanest choice takes, by its plan.
        by_kind: its bytes at the peak, by kind.
        samples: the most samples of a batch with which a choice would fit, by its plan; None if not
            even one does, or smaller batches were not looked at.
    """

    def __init__(
        self, message: str, least: int, by_kind: dict[str, int], samples: int | None = None
    ) -> None:
        super().__init__(message)
        self.least, self.by_kind, self.samples = least, by_kind, samples

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.least, self.by_kind, self.samples)


def given_does_not_fit(
    choice: Choice, plan: Plan, within: int, host_room: int | None = None
) -> DoesNotFit:
    """Returns the error that says what a choice takes that was made before."""
    on_host = plan.total_bytes <= within and host_room is not None
    takes, room = plan.total_bytes, within
    if on_host:
        takes, room = plan.host_peak_bytes, host_room or 0
    where, which = (" on the host", "host_budget") if on_host else ("", "budget")
    return DoesNotFit(
        f"the choice that was given ({choice}) takes {format_bytes(takes)}{where}, and the "
        f"{which} leaves {format_bytes(room)} besides its margin: give a larger {which}, or leave "
        "choice out to look for another",
        plan.total_bytes,
        plan.peak_by_kind,
    )


def does_not_fit(
    candidates: Candidates,
    every: Sequence[Candidate],
    leanest: tuple[Choice, Plan],
    budget: int,
    within: int,
) -> DoesNotFit:
    """Returns the error that says which floor was hit, and what would help.

    Args:
        every: the candidates, as they are known.
        leanest: the choice that takes the least, and its plan.
        budget: that was asked for.
        within: what is left of it beside the margin.
    """
    choice, plan = leanest
    least, kinds = plan.total_bytes, plan.peak_by_kind
    shown = _listed(kinds)
    if plan.device_share.bytes:
        shown += f", the device {format_bytes(plan.device_share.bytes)}"
    needed = least + budget - within + least // 100  # with its margin
    advice = [f"a budget of {format_bytes(needed)}", *_allowing(candidates, plan, within)]
    is_evaluation = plan.timeline.peak_index >= evaluation_of(candidates.step, plan)
    if is_evaluation:
        advice.append("smaller batches of evaluation")
    advice += _adapting(candidates, choice, within)
    samples = most_samples(candidates, every, within)
    if samples is not None:
        advice.append(f"a batch of {samples} samples, not {samples_of(candidates.step.batch)}")
    reasons = f" ({'; '.join(candidates.notes)})" if candidates.notes else ""
    return DoesNotFit(
        f"nothing trains the model within {format_bytes(budget)}, of which "
        f"{format_bytes(budget - within)} is left free: the leanest choice takes "
        f"{format_bytes(least)}{' in evaluation' * is_evaluation} ({choice}), of which {shown}. "
        "What would fit: "
        f"{', or '.join(advice)}{reasons}",
        least,
        kinds,
        samples,
    )


def _listed(kinds: Mapping[str, int]) -> str:
    """Returns bytes by kind as text, the most first."""
    most = sorted(((size, name) for name, size in kinds.items() if size), reverse=True)
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in most)


def _allowing(candidates: Candidates, leanest: Plan, within: int) -> Iterator[str]:
    """Yields what to allow besides, by a plan that fits.

    Args:
        leanest: the plan of the leanest choice of what is allowed.
    """
    now, kinds = candidates.techniques, leanest.peak_by_kind
    moved = sum(kinds[kind] for kind in ("optimizer_state", "master_weights", "gradients"))
    tried = {(now.in_8_bits, _allowed_of(choice)) for choice in now.choices}
    more = [name for name in allowable() if name not in now.allowed]
    pairs = [(name, "bf16") for name in more if name != "bf16" and "bf16" in more]
    for names in [*((name,) for name in more), *pairs]:
        if ReplacedOptimizer.allowed.keys() >= {*names} and leanest.total_bytes - moved > within:
            continue  # another optimizer leaves the rest of the peak as it is
        allowed = (*now.allowed, *names)
        every = techniques_of(now.step, allowed, now.only, now.parts_add_up, now.on_host)
        keys = dict.fromkeys(map(_allowed_of, every.choices))
        new = [key for key in keys if (every.in_8_bits, key) not in tried]
        tried |= {(every.in_8_bits, key) for key in new}
        if not {*names}.isdisjoint(Frozen.allowed):
            new = new[-1:]  # beside weights that do not train the optimizer is worth little
        if any(_fits(candidates, every, key, within) for key in new):
            shown = ", ".join(f'"{name}"' for name in allowed)
            yield f"allow=({shown}{',' if len(allowed) == 1 else ''})"
            return


def _adapting(candidates: Candidates, leanest: Choice, within: int) -> Iterator[str]:
    """Yields the adapters to train in place of all weights, by a plan that fits."""
    optimizer = candidates.techniques.optimizer_of(leanest)
    for name, step, *_ in adapters_instead(
        candidates.step_with(leanest, candidates.names, optimizer)
    ):
        try:
            plan = plan_of(step)
        except PlanError:
            continue
        if plan.total_bytes <= within:
            yield f"{name}, which trains adapters alone in {format_bytes(plan.total_bytes)}"
            return


def _allowed_of(choice: Choice) -> Choice:
    """Returns of a choice its optimizer, and what changes the mathematics besides."""
    return Choice().but(**{t.field: t.value(choice) for t in TECHNIQUES if t.allowed})


def _fits(candidates: Candidates, techniques: Techniques, bare: Choice, within: int) -> bool:
    """Returns whether a step with this optimizer and such weights fits at the leanest levels, by
    plans alone."""
    # Of micro-batches some may be known not to be possible.
    count = candidates.techniques.micro_batches[-1]
    base = bare.but(micro_batches=count, fused_loss=techniques.fused_losses[-1])
    for choice in (base, base.but(micro_batches=1, release=True)):
        if choice in techniques.choices:
            try:
                optimizer = techniques.optimizer_of(choice)
                plan = candidates.with_techniques(techniques).planned_with(choice, optimizer)
            except PlanError:
                continue
            if plan.total_bytes <= within:
                return True
    return False


def most_samples(candidates: Candidates, every: Sequence[Candidate], within: int) -> int | None:
    """Returns the most samples of a smaller batch with which a step fits, by plans at the leanest
    levels, or None. Bytes are almost a line over samples, so that a few plans find it."""
    techniques = candidates.techniques
    unit = techniques.micro_batches[0]  # what a loop makes anyway
    whole = (samples_of(techniques.step.batch) or 0) // unit
    own = [candidate for candidate in every if candidate.choice.micro_batches == unit]
    if not own:
        return None
    leanest = min(own, key=lambda candidate: candidate.points[0].peak)
    optimizer = techniques.optimizer_of(leanest.choice)
    releases = leanest.choice.but(release=True) in techniques.choices
    choice = leanest.choice_of(leanest.points[0]).but(release=releases)

    def size(units: int) -> int | None:
        try:
            return candidates.planned_with(choice, optimizer, units * unit).total_bytes
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
