"""Reads from one plan the bytes that a step takes besides its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ...memory.events import Timeline
from ...planning.api import plan_of
from ...planning.recorder import Recorder
from ...planning.result import Plan
from ...step.calls import results_of
from ...step.description import Step
from .block_costs import Measured


@dataclass(frozen=True)
class Outline:
    """The bytes of a step that the levels of its blocks do not decide.

    Attributes:
        base: live when the first block begins its forward pass.
        after_forward: most that what runs behind the last block takes in its forward pass.
        after_backward: the same in its backward pass.
        gradients: of parameters behind the last block, which stay while blocks run backward; with
            release, the most that wait for the others of their bucket.
        floor: the most that is live while no block runs nor is kept: before the forward pass of the
            first block, behind its backward pass, and in the optimizer's step.
        plan: that they were read from.
        evaluation: the most that is live in an evaluation between two steps; 0 if there is none.
    """

    base: int
    after_forward: int
    after_backward: int
    gradients: int
    floor: int
    plan: Plan
    evaluation: int = 0

    @property
    def least(self) -> int:
        """Returns the most bytes that are live at any time that no block decides."""
        return max(self.floor, self.evaluation)

    @cached_property
    def standing(self) -> dict[str, int]:
        """Returns the bytes of each kind when the last forward pass begins."""
        return self.bytes_at("forward")

    @cached_property
    def all_gradients(self) -> int:
        """Returns the most bytes of gradients that the plan has at once."""
        return self.plan.timeline.most_by_kind["gradients"]

    def bytes_at(self, phase: str) -> dict[str, int]:
        """Returns the bytes of each kind when this phase of the plan begins for the last time."""
        timeline = self.plan.timeline
        return timeline.by_kind(max(span.start for span in timeline.spans if span.phase == phase))

    def peak(
        self, measured: Measured, levels: Sequence[str], *, gradients_stay: bool = True
    ) -> int:
        """Returns the most bytes that are live in a step whose blocks are at ``levels``."""
        costs = [block.levels[level] for block, level in zip(measured.blocks, levels, strict=True)]
        held = most = 0
        kept = 0  # besides, until the forward pass of the model has ended
        for cost in costs:
            most = max(most, held + kept + cost.forward)
            held, kept = held + cost.held, kept + cost.kept
        most = max(most, held + kept + self.after_forward, held + self.after_backward)
        held += self.gradients
        for block, cost in zip(reversed(measured.blocks), reversed(costs)):
            backward = cost.backward if gradients_stay else cost.backward_released
            most = max(most, held + backward)
            held += (block.gradients if gradients_stay else 0) - cost.held
        return max(self.least, self.base + most)

    def part(self, count: int) -> Outline:
        """Returns the outline of a step of ``count`` micro-batches, before that is planned: all
        gradients are there from the second of them on."""
        standing, gradients = sum(self.standing.values()), self.all_gradients
        before = max(0, self.base - standing)  # the first block
        passing = max(0, self.floor - standing - gradients)  # live around the blocks
        around = standing + gradients + -(-passing // count)
        return replace(
            self,
            base=standing + -(-before // count) + gradients,
            after_forward=-(-self.after_forward // count),
            after_backward=-(-self.after_backward // count),
            gradients=0,
            floor=max(self.plan.timeline.peaks_by_phase().get("optimizer", 0), around),
        )


def outline(step: Step, names: Sequence[str], kept: int = 0) -> Outline:
    """Returns the outline of a step.

    Args:
        step: of a model whose blocks keep what they keep at some levels, the leanest best. One
            step is enough.
        names: of its blocks, in forward order. Without any, all of a pass is behind them.
        kept: bytes that stay until the forward pass has ended, of all blocks together at those
            levels; see :class:`headroom.fitting.costs.block_costs.LevelCost`.

    Raises:
        PlanError: the step cannot be followed on fakes.
    """
    marks = _Marks(names)
    # Ladders keep outlines, which shall keep no optimizer of a fit: what advice is planned with.
    plan = replace(settled(plan_of(step, marks.watch)), _again=None)
    live = plan.timeline.bytes_over_events()
    base = forward = backward = floor = at = gradients = 0
    trained = evaluation_of(step, plan)
    for start, turn, end in _passes(plan.timeline):
        begin = min((k for k in marks.begins if start <= k < turn), default=start + 1)
        reached = max((k for k in marks.reached if start <= k < turn), default=begin)
        turned = min((k for k in marks.turns if turn <= k < end), default=end)
        ended = max((k for k in marks.ends if turn <= k < end), default=end)
        base, before = live[begin - 1], live[reached - 1]
        forward = max(live[reached - 1 : turn]) - before
        backward = max(live[turn:turned]) - before + kept
        gradients = sum(  # a fused loss makes those of its head in the forward pass
            a.bytes
            for a in plan.timeline.allocations
            if a.kind == "gradients" and start <= a.start and a.is_live(turned - 1)
        )
        floor, at = max(floor, *live[at:begin]), ended
    if step.release:  # what waits to be released
        size = sum(p.nbytes for p in step.model.parameters())
        gradients = min(size, int(step.release))
    floor, evaluation = max(floor, *live[at:trained]), max(live[trained:], default=0)
    return Outline(base, forward, max(0, backward), gradients, floor, plan, evaluation)


def evaluation_of(step: Step, plan: Plan) -> int:
    """Returns the event at which the evaluation begins; behind all events if there is none."""
    return plan.timeline.events if step.evaluates is None else plan.timeline.spans[-1].start


def settled(plan: Plan) -> Plan:
    """Returns a plan of a first step as that of a later one, which finds the optimizer's state; a
    plan of several steps as it is. A plan of one step takes half as long to make as one of two, and
    is for estimates: what else the first step leaves behind is not in it."""
    timeline = plan.timeline
    if any(span.step for span in timeline.spans):
        return plan
    states = ("optimizer_state", "master_weights")
    allocations = [
        replace(a, start=0) if a.kind in states and a.end is None else a
        for a in timeline.allocations
    ]
    return replace(
        plan, timeline=Timeline(allocations, timeline.spans, timeline.device, timeline.notes)
    )


def _passes(timeline: Timeline) -> Iterator[tuple[int, int, int]]:
    """Yields for each micro-batch the events at which its forward and backward pass begin, and at
    which the latter ends."""
    spans = timeline.spans
    for number, (first, second) in enumerate(zip(spans, spans[1:])):
        if first.phase == "forward" and second.phase == "backward":
            following = spans[number + 2 : number + 3]
            end = following[0].start if following else timeline.events
            yield first.start, second.start, end


class _Marks:
    """The numbers of the events at which blocks begin and end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.begins: list[int] = []  # the forward pass of the first block
        self.reached: list[int] = []  # the forward pass of the last block has ended
        self.turns: list[int] = []  # its backward pass begins
        self.ends: list[int] = []  # the backward pass of the first block has ended

    def watch(self, model: nn.Module, recorder: Recorder) -> None:
        """Adds the hooks that take the numbers."""

        def begin(block: nn.Module, args: Any, kwargs: Any) -> None:
            self.begins.append(recorder.now)
            note((args, kwargs), self.ends)

        def reach(block: nn.Module, args: Any, result: Any) -> None:
            self.reached.append(recorder.now)
            note(result, self.turns)

        def note(value: Any, at: list[int]) -> None:
            for x in results_of(value):
                x.register_hook(lambda grad: at.append(recorder.now))

        if self._names:
            first, last = map(model.get_submodule, (self._names[0], self._names[-1]))
            first.register_forward_pre_hook(begin, with_kwargs=True)
            last.register_forward_hook(reach)
