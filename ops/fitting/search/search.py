"""Finds the fastest choice within a budget."""

from __future__ import annotations

from ...planning.result import Plan
from ...step.errors import PlanError
from ..choice import Choice, FrontierPoint
from .candidate import Candidate, Found
from .candidates import Candidates
from .knapsack import Point
from .techniques import Techniques

PLANS = 8  # at most, to find the fastest choice
ROOM = 0.02  # of the budget, which is not worth another plan
CAUTION = 0.003  # of the budget, which choices leave free until they are planned
SLOWER = 0.01  # that twice as many micro-batches are taken to be until they are timed


class Search:
    """Searches the candidates for one model. What is measured and planned is kept for further
    budgets.

    Args:
        candidates: which are made as they are asked for.
        given: the only choice, made before, for which nothing is measured; None: any may be found.

    Attributes:
        known: what is known of each choice, which is without levels.
    """

    def __init__(self, candidates: Candidates, given: Choice | None = None) -> None:
        self.candidates, self.given = candidates, given
        self.known: dict[Choice, Candidate] = {}
        self._formats = candidates.techniques.formats[:1]  # of frozen weights: those looked at

    def with_techniques(self, techniques: Techniques, given: Choice | None) -> Search:
        """Returns this search for another call; see :meth:`Candidates.with_techniques`. This one
        stays as it is but for what the other one measures and plans."""
        return Search(self.candidates.with_techniques(techniques), given)

    def every(self) -> list[Candidate]:
        """Returns all candidates that the host has room for, with those formats of frozen weights
        that were looked at.

        Raises:
            PlanError: the model as it is cannot be planned.
        """
        if not self.known:
            self._look()
        return [candidate for candidate in self.known.values() if candidate.points]

    def best(self, budget: int) -> Found | None:
        """Returns the fastest choice whose plan is at most ``budget`` bytes, and has room on the
        host, or None.

        Raises:
            PlanError: the model as it is cannot be planned.
            ValueError: the choice that was given is none for this model.
        """
        if self.given is not None:
            found = self.candidates.taken(self.given)
            return found if self.fits(found.plan, budget) else None
        # Frozen weights lose bits for good, which undo() does not give back, so that comes after
        # all that costs time alone: a format is looked at, and its blocks are measured, where
        # nothing fits without it. All else that is allowed competes by its time.
        for number, frozen in enumerate(self.candidates.techniques.formats, 1):
            self._look_at(number)
            if number > 1 and not any(c.choice.frozen == frozen for c in self.every()):
                continue  # the model does not run with it, as a note says
            if (found := self._best(budget, frozen)) is not None:
                return found
        return None

    def _look_at(self, count: int) -> None:
        """Looks at so many formats of frozen weights, besides those that were looked at."""
        formats = self.candidates.techniques.formats[:count]
        if len(formats) > len(self._formats) or not self.known:
            self._formats = max(formats, self._formats, key=len)
            self._look()

    def _best(self, budget: int, frozen: str) -> Found | None:
        """Returns the fastest choice with this format of frozen weights, as :meth:`best` does."""
        best, plans = self._best_planned(budget, frozen), 0
        while plans < PLANS:
            picked = self._fastest(budget, frozen)
            if picked is None:
                break
            seconds, candidate, point = picked
            choice = candidate.choice_of(point)
            if best is not None and best.seconds is not None:
                if choice == best.choice or seconds >= best.seconds:
                    break
            if choice.micro_batches > 1 and not self._parts_agree():
                continue  # and not timed, for parts may not even run
            if not candidate.is_timed:
                self._time(candidate)
                continue
            plans += 1
            plan = self._planned(choice)
            if plan is not None and self.fits(plan, budget):
                best = self._found(choice, plan, seconds)
                if plan.total_bytes >= (1 - ROOM) * budget or point.levels == candidate.keeping_all:
                    break
        return best or self._leanest_within(budget, frozen)

    def fits(self, plan: Plan, budget: int | None = None) -> bool:
        """Returns whether a plan is within the budget, if there is one, and what the host has."""
        room = self.candidates.host_room
        return (budget is None or plan.total_bytes <= budget) and (
            room is None or plan.host_peak_bytes <= room
        )

    def frontier(self, of: Choice | None = None) -> list[FrontierPoint]:
        """Returns the choices that no other beats, by ascending peaks. Left out are choices whose
        parts of a batch have not been timed, or compared with the batch.

        Args:
            of: only choices that differ from this one in their levels.
        """
        every = self.every()
        if of is not None:
            every = [candidate for candidate in every if candidate.choice == of.but(levels=())]
        else:
            parts = self.candidates.agree
            every = [c for c in every if c.is_timed and (parts or c.choice.micro_batches == 1)]
        found = sorted(
            (point.peak, point.seconds, candidate.choice.changes, n, m, point)
            for n, candidate in enumerate(every)
            for m, point in enumerate(candidate.points)
        )
        kept: list[FrontierPoint] = []
        for peak, seconds, _, n, _, point in found:
            if not kept or seconds < kept[-1].seconds:
                host = every[n].host_at(point.levels)
                kept.append(FrontierPoint(peak, seconds, every[n].choice_of(point), host))
        return kept

    def time_all(self) -> None:
        """Looks at all formats of frozen weights and times parts of all sizes, so that
        :meth:`frontier` has them."""
        self._look_at(len(self.candidates.techniques.formats))
        self._parts_agree()
        for candidate in self.every():
            if not self.known[candidate.choice].is_timed:
                self._time(candidate)

    def leanest(self, frozen: str | None = None) -> tuple[Choice, Plan]:
        """Returns the choice that takes the least, and its plan.

        Args:
            frozen: the format of frozen weights that it has; None: any.

        Raises:
            PlanError: no choice can be planned.
        """
        self._parts_agree()
        every = (c for c in self.every() if frozen in (None, c.choice.frozen))
        ranked = sorted(every, key=lambda candidate: candidate.points[0].peak)
        found = []
        for bare in [candidate.choice for candidate in ranked[:3]]:
            candidate = self.known.get(bare)  # which another plan may have been of use to
            if candidate is None:
                continue
            choice = candidate.choice_of(candidate.points[0])
            plan = self._planned(choice)
            if plan is not None and self.fits(plan):
                found.append((plan.total_bytes, len(found), choice, plan))
        if not found:
            raise PlanError("; ".join(self.candidates.notes) or "nothing can be planned")
        return min(found)[2:]

    def _look(self) -> None:
        """Makes the candidates anew, and keeps those of which nothing new is known: they have their
        points."""
        before, self.known = self.known, {}
        for found in self.candidates.every(self._formats):
            old = before.get(found.choice)
            self.known[found.choice] = old if old is not None and old == found else found

    def _fastest(self, budget: int, frozen: str) -> tuple[float, Candidate, Point] | None:
        """Returns the fastest estimate within the budget; of equal ones that with the fewest
        changes."""
        every, picked = [c for c in self.every() if c.choice.frozen == frozen], []
        for number, candidate in enumerate(every):
            is_estimate = candidate.planned is None
            point = candidate.within(round((1 - CAUTION) * budget) if is_estimate else budget)
            if point is not None:
                count = candidate.choice.micro_batches
                slower = 0 if candidate.is_timed else SLOWER * count.bit_length()
                seconds = (1 + slower) * point.seconds
                picked.append((seconds, candidate.choice.changes, number, point))
        if not picked:
            return None
        seconds, _, number, point = min(picked)
        return seconds, every[number], point

    def _time(self, candidate: Candidate) -> None:
        """Times what the candidate has in common with others."""
        self.candidates.time(candidate.choice)
        self._look()

    def _parts_agree(self) -> bool:
        """Returns whether batches can be parted. Where they cannot, there are no such choices any
        more."""
        before = self.candidates.techniques
        agree = self.candidates.parts_agree()
        if self.candidates.techniques is not before:
            self._look()
        return agree

    def _best_planned(self, budget: int, frozen: str) -> Found | None:
        """Returns the fastest choice that fits of those that were planned for other budgets."""
        found = []
        for number, (choice, plan) in enumerate(self.candidates.plans.items()):
            candidate = self.known.get(choice.but(levels=()))
            if candidate is None or choice.frozen != frozen:
                continue
            if candidate.is_timed and self.fits(plan, budget):
                seconds = candidate.at(choice.levels).seconds
                found.append((seconds, choice.changes, number, self._found(choice, plan, seconds)))
        return min(found)[-1] if found else None

    def _planned(self, choice: Choice) -> Plan | None:
        """Returns the plan of a choice, or None where it cannot be: then the choice is no more."""
        plan = None
        try:
            plan = self.candidates.plan(choice)
        except PlanError as error:
            self.candidates.leave_out(choice, error)
        self._look()
        return plan

    def _leanest_within(self, budget: int, frozen: str) -> Found | None:
        """Returns the leanest choice, where estimates said that it is above the budget, and it is
        not."""
        choice, plan = self.leanest(frozen)
        candidate = self.known.get(choice.but(levels=()))
        if plan.total_bytes > budget or candidate is None:
            return None
        self._time(candidate)
        return self._found(choice, plan, self.known[candidate.choice].at(choice.levels).seconds)

    def _found(self, choice: Choice, plan: Plan, seconds: float) -> Found:
        return Found(choice, plan, seconds, tuple(self.candidates.names))
