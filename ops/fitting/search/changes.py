"""Says what was before a choice, what each of its techniques is worth, and which kinds of bytes it
takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...patching.levels import Blocks
from ...planning.api import plan_of
from ...step.errors import PlanError
from ...step.optimizers import is_headroom, state_bytes
from ...techniques.frozen import Frozen
from ...techniques.levels import counted
from ...techniques.technique import in_rows
from ..choice import SAME, Choice
from ..costs.outline import settled
from ..report import Change
from .candidate import Candidate, Found
from .candidates import Candidates

Known = Mapping[Choice, Candidate]


def plain_choice(candidates: Candidates, known: Known) -> Choice:
    """Returns the choice that changes the least: all blocks keep what they can."""
    techniques = candidates.techniques
    levels = next(iter(known.values())).keeping_all
    return Choice(
        levels,
        techniques.micro_batches[0],
        fused_loss=techniques.fused_losses[0],
        frozen=techniques.formats[0],
    )


def peak_as_given(candidates: Candidates, steps: int = 2) -> int | None:
    """Returns the planned bytes of the model as it was given, or None if it cannot be planned. With
    one step they are estimated from the first, which takes half as long."""
    step, choice = candidates.step, Choice((), candidates.techniques.micro_batches[0])
    try:
        return settled(
            plan_of(candidates.step_with(choice, (), step.optimizer).but(steps=steps))
        ).total_bytes
    except PlanError:
        return None


def peak_before(candidates: Candidates, known: Known, found: Found) -> int | None:
    """Returns the bytes of the model as it was given, for the report of what was found, or None if
    it cannot be planned. It takes no plan of its own where the search has made one from which they
    follow: for blocks whose levels are known, with the optimizer that was given."""
    techniques, now = candidates.techniques, Blocks(candidates.step.model).now
    if now is not None and techniques.micro_batches[0] == 1:
        levels = tuple(now[name] for name in candidates.names)
        choice = Choice(levels, fused_loss=techniques.fused_losses[0])
        if choice == found.choice:
            return found.plan.total_bytes
        if (candidate := known.get(choice.but(levels=()))) is not None:
            return candidate.at(levels).peak
    return peak_as_given(candidates, steps=1)


def changes_of(
    candidates: Candidates, known: Known, found: Found, before: int | None
) -> tuple[list[Change], float | None]:
    """Returns what each technique changed, one after the other, and the seconds of a step of the
    model as it was given. The bytes add up to the difference of the two plans.

    Args:
        before: the planned peak of the model as it was given.
    """
    rows: list[Change] = []
    peak, seconds, start = before, 0.0, found.seconds
    for name, was, now, choice in _steps(candidates, known, found.choice):
        candidate = known.get(choice.but(levels=()))
        if candidate is None:
            continue
        point = candidate.at(choice.levels)
        here, peak = point.peak, point.peak if peak is None else peak
        if not name:
            seconds = start = point.seconds
            if choice.frozen != "given":
                name, was, now = Frozen().change(choice, choice, candidates.step)
            elif candidates.swaps_layers:
                name, was, now = "layers", "as given", "Headroom's"
            elif here - peak > SAME * peak:  # the blocks of the model kept less before
                name, was, now = "levels", "as given", counted(choice.levels)
            else:
                continue
        if choice == found.choice:
            here = found.plan.total_bytes
        rows.append(Change(name, here - peak, point.seconds - seconds, was, now))
        peak, seconds = here, point.seconds
    return rows, start


def _steps(
    candidates: Candidates, known: Known, end: Choice
) -> Iterator[tuple[str, str, str, Choice]]:
    """Yields names, what was before and after, and choices, from the model as it was given to the
    one that was found, with one technique more each time."""
    choice = plain = plain_choice(candidates, known)
    yield "", "", "", choice
    for technique in in_rows():
        value = technique.value(end)
        if value != technique.value(choice):
            choice = choice.but(**{technique.field: value})
            yield *technique.change(plain, end, candidates.step), choice


def peak_by_kind(
    candidates: Candidates, candidate: Candidate, levels: Sequence[str], peak: int
) -> dict[str, int]:
    """Returns the bytes of each kind at the peak of a step; they add up to ``peak``, its bytes on
    the device.

    What stands for the whole step is known exactly. What blocks keep is what was measured of them,
    and what is kept outside of blocks is what the plan has. The rest is temporaries.
    """
    outline, blocks = candidate.outline, candidate.measured.blocks
    standing = ("parameters", "master_weights", "buffers", "batch", "optimizer_state")
    found = {kind: outline.standing[kind] for kind in standing}
    optimizer = candidates.techniques.optimizer_of(candidate.choice)
    if candidate.choice.offload:
        memory = candidates.paged(candidate.choice)
        found["optimizer_state"] = memory.resident + memory.ring
    elif is_headroom(optimizer):
        found["optimizer_state"] = state_bytes(optimizer)
    if candidate.planned is None:
        found["parameters"] += candidates.streamed(candidate.choice).device
    found["device"] = outline.plan.device_share.bytes
    left = max(0, peak - sum(found.values()))
    in_step = peak - found["device"] <= outline.floor  # of the optimizer, or around the blocks
    gradients = outline.all_gradients
    if candidate.choice.release or not (in_step or candidate.choice.micro_batches > 1):
        gradients = min(gradients, outline.gradients)
    found["gradients"] = min(left, gradients)
    left -= found["gradients"]
    # The plan has the blocks at their leanest; the last of them is computed again at its most.
    in_plan = sum(block.levels[block.leanest].held for block in blocks)
    outside = max(0, outline.bytes_at("backward")["activations"] - in_plan)
    held = [block.levels[level].held for block, level in zip(blocks, levels, strict=True)]
    again = (cost.held - held[-1] for block in blocks[-1:] for cost in block.levels.values())
    kept = 0 if in_step else outside + sum(held) + max(again, default=0)
    found["activations"] = min(left, kept)
    found["temporaries"] = left - found["activations"]
    return {kind: size for kind, size in found.items() if size}
