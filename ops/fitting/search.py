"""Finds the fastest choice within a budget."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..planning.result import Plan
from ..step.errors import PlanError
from .choice import Choice
from .families import Families
from .knapsack import Point
from .outer import Outer
from .techniques import Techniques

__all__ = ["SAME", "Found", "FrontierPoint", "Search"]

SAME = 0.002
"""The share of bytes or seconds below which two choices are no different in a report."""

PLANS = 8  # at most, to find the fastest choice
ROOM = 0.02  # of the budget, which is not worth another plan
CAUTION = 0.003  # of the budget, which choices leave free until they are planned
SLOWER = 0.01  # that twice as many micro-batches are taken to be until they are timed


@dataclass(frozen=True)
class Found:
    """A choice with the plan that says that it fits.

    Attributes:
        seconds: of a step, estimated.
        blocks: the names of the blocks that ``choice.levels`` is of.
    """

    choice: Choice
    plan: Plan
    seconds: float
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class FrontierPoint:
    """A choice that no other beats in both.

    Attributes:
        peak: bytes of a step on its device, estimated from plans.
        seconds: of a step, estimated.
        choice: how.
    """

    peak: int
    seconds: float
    choice: Choice


class Search:
    """The search for one model. What it measures and plans is kept for further budgets.

    Attributes:
        families: what measures and plans.
    """

    def __init__(self, families: Families) -> None:
        self.families = families
        self._outers: dict[int, list[Outer]] = {}
        self._gone: set[Choice] = set()  # that cannot be planned

    def with_optimizers(self, techniques: Techniques) -> Search:
        """Returns this search for another call, in which the optimizers of ``techniques`` take the
        place of those that were given and made before: what was measured and planned holds for
        them too. This search stays as it is but for what the other one measures and plans.

        Args:
            techniques: of the same model and so on, with as many optimizers to choose from.
        """
        made, families = copy.copy(self), copy.copy(self.families)
        families.techniques = replace(
            families.techniques,
            given=techniques.given,
            optimizers=techniques.optimizers,
            notes=[*families.techniques.notes],
        )
        families.notes = [*families.notes]
        made.families = families
        made._outers, made._gone = {**self._outers}, {*self._gone}
        return made

    def best(self, budget: int) -> Found | None:
        """Returns the fastest choice whose plan is at most ``budget`` bytes, or None.

        Raises:
            PlanError: the model as it is cannot be planned.
        """
        best: Found | None = None
        plans = 0
        while plans < PLANS:
            picked = self._fastest(budget)
            if picked is None:
                break
            seconds, outer, point = picked
            choice = outer.choice_of(point)
            if best is not None and (choice == best.choice or seconds >= best.seconds):
                break
            if choice.micro_batches > 1 and not self._parts_agree():
                continue  # and not timed, for parts may not even run
            if not outer.is_timed:
                self._time(outer)
                continue
            plans += 1
            plan = self._planned(outer, point)
            if plan is not None and plan.total_bytes <= budget:
                best = self._found(choice, plan, seconds)
                if plan.total_bytes >= (1 - ROOM) * budget or point.levels == self.keeping_all():
                    break
        return best or self._leanest_within(budget)

    def frontier(self, of: Choice | None = None) -> list[FrontierPoint]:
        """Returns the choices that no other beats, by ascending peaks. Left out are choices whose
        parts of a batch have not been timed, or compared with the batch.

        Args:
            of: only choices that differ from this one in their levels.
        """
        every = [
            outer
            for outer in self.every()
            if (self._is_known(outer) if of is None else outer.choice == of.but(levels=()))
        ]
        found = sorted(
            (point.peak, point.seconds, outer.choice.changes, n, m, point)
            for n, outer in enumerate(every)
            for m, point in enumerate(outer.points)
        )
        kept: list[FrontierPoint] = []
        for peak, seconds, _, n, _, point in found:
            if not kept or seconds < kept[-1].seconds:
                kept.append(FrontierPoint(peak, seconds, every[n].choice_of(point)))
        return kept

    def _is_known(self, outer: Outer) -> bool:
        agree = outer.choice.micro_batches == 1 or self.families.agree is True
        return outer.is_timed and agree

    def time_all(self) -> None:
        """Times parts of all sizes, so that :meth:`frontier` has them."""
        self._parts_agree()
        for outer in list(self.every()):
            if not outer.is_timed:
                self._time(outer)

    def every(self) -> Iterator[Outer]:
        """Yields all choices, without levels."""
        for count in self.families.techniques.micro_batches:
            if count not in self._outers:
                self._outers[count] = list(self.families.outers(count))
            yield from self._outers[count]

    def plan_of(self, choice: Choice) -> Plan:
        """Returns the plan of a choice.

        Raises:
            PlanError: it cannot be planned.
        """
        outer = self.outer_of(choice)
        if outer is None:
            raise PlanError(f"{choice} is none of the choices for this model")
        return self.families.plan(choice, outer)

    def outer_of(self, choice: Choice) -> Outer | None:
        """Returns what is known of a choice, whatever its levels, or None if it cannot be."""
        bare = choice.but(levels=())
        return next((outer for outer in self.every() if outer.choice == bare), None)

    def priced(self, choice: Choice) -> Found:
        """Returns a choice with its plan and its time, whoever made it.

        Raises:
            PlanError: it cannot be planned.
        """
        if choice.micro_batches > 1:
            self._parts_agree()
        outer = self.outer_of(choice)
        if outer is not None and not outer.is_timed:
            self._time(outer)
            outer = self.outer_of(choice)
        if outer is None or len(choice.levels) not in (0, len(self.families.names)):
            raise PlanError(f"{choice} is not possible for this model and its optimizer")
        plan = self.families.plan(choice, outer)
        return self._found(choice, plan, outer.at(choice.levels).seconds)

    def keeping_all(self) -> tuple[str, ...]:
        """Returns the levels at which all blocks keep the most."""
        first = next(self.every())
        return tuple(next(iter(block.levels)) for block in first.measured.blocks)

    def leanest(self) -> tuple[Choice, Plan]:
        """Returns the choice that takes the least, and its plan.

        Raises:
            PlanError: no choice can be planned.
        """
        self._parts_agree()
        ranked = sorted(self.every(), key=lambda outer: outer.points[0].peak)
        found = []
        for choice in [outer.choice for outer in ranked[:3]]:
            outer = self.outer_of(choice)  # which another plan may have been of use to
            if outer is None:
                continue
            point = outer.points[0]
            plan = self._planned(outer, point)
            if plan is not None:
                found.append((plan.total_bytes, len(found), outer.choice_of(point), plan))
        if not found:
            raise PlanError("; ".join(self.families.notes) or "nothing can be planned")
        return min(found)[2:]

    def _fastest(self, budget: int) -> tuple[float, Outer, Point] | None:
        """The fastest estimate within the budget; of equal ones that with the fewest changes."""
        every = list(self.every())
        picked = [
            (self._expected(outer, point), outer.choice.changes, n, point)
            for n, outer in enumerate(every)
            if (point := outer.within(self._room(outer, budget))) is not None
        ]
        if not picked:
            return None
        seconds, _, n, point = min(picked)
        return seconds, every[n], point

    @staticmethod
    def _room(outer: Outer, budget: int) -> int:
        return budget if outer.is_planned else round((1 - CAUTION) * budget)

    def _expected(self, outer: Outer, point: Point) -> float:
        if outer.is_timed:
            return point.seconds
        return point.seconds * (1 + SLOWER * outer.choice.micro_batches.bit_length())

    def _time(self, outer: Outer) -> None:
        """Times what the choice has in common with others, and looks at all of those anew."""
        self.families.time(outer)
        for count in self._outers:
            self._look_again(count)

    def _parts_agree(self) -> bool:
        """Whether batches can be parted. Where they cannot, there are no such choices any more."""
        if self.families.parts_agree():
            return True
        for count in self.families.techniques.only_whole_batches():
            self._outers.pop(count, None)
        return False

    def _look_again(self, count: int) -> None:
        """Estimates all choices with so many micro-batches anew, but for what was planned."""
        planned = {o.choice: o for o in self._outers[count]}
        self._outers[count] = [
            outer for outer in self.families.outers(count) if outer.choice not in self._gone
        ]
        for fresh in self._outers[count]:
            fresh.take(planned[fresh.choice])

    def _planned(self, outer: Outer, point: Point) -> Plan | None:
        """The plan of a choice, or None where it cannot be: then the choice is no more."""
        try:
            plan = self.families.plan(outer.choice_of(point), outer)
            self._look_again(outer.choice.micro_batches)
            return plan
        except PlanError as error:
            if (note := str(error)) not in self.families.notes:
                self.families.notes.append(note)
            self._gone.add(outer.choice)
            count = outer.choice.micro_batches
            self._outers[count] = [o for o in self._outers[count] if o.choice not in self._gone]
            return None

    def _leanest_within(self, budget: int) -> Found | None:
        """The leanest choice, where estimates said that it is above the budget, and it is not."""
        choice, plan = self.leanest()
        outer = self.outer_of(choice)
        if plan.total_bytes > budget or outer is None:
            return None
        self._time(outer)
        outer = self.outer_of(choice) or outer
        return self._found(choice, plan, outer.at(choice.levels).seconds)

    def _found(self, choice: Choice, plan: Plan, seconds: float) -> Found:
        return Found(choice, plan, seconds, tuple(self.families.names))
