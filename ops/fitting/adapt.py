"""Spends memory that was measured to be left on faster levels."""

from __future__ import annotations

from typing import Any

from ..planning.result import Plan
from ..step.errors import PlanError

__all__ = ["adapt"]

TRIES = 3  # plans at most


def adapt(fitted: Any) -> bool:
    """Sets faster levels of a :class:`Fitted` if the measured peak says that there is room for
    them, and returns whether it did. What is set has a plan, and the measured peak and what its
    plan adds to the last one are within the budget and its margin."""
    measured, seconds = fitted.measured_peak, fitted.predicted_seconds
    if measured is None or fitted.planner is None or seconds is None:
        return False
    try:
        now = fitted.planner(fitted.choice)
    except PlanError:
        return False
    off = measured - now.allocated_bytes
    faster = [
        point
        for point in fitted.same_but_levels()
        if point.seconds < seconds and point.peak + off <= fitted.within
    ]
    for point in sorted(faster, key=lambda point: point.seconds)[:TRIES]:
        try:
            plan = fitted.planner(point.choice)
        except PlanError:
            continue
        if expected(plan, now, measured) <= fitted.within:
            fitted.take(point, plan)
            return True
    return False


def expected(plan: Plan, now: Plan, measured: int) -> int:
    """Returns the bytes on the device that a step of a plan takes at the most, if steps of the plan
    ``now`` were measured to take ``measured`` bytes.

    A plan may be wrong by other bytes in each phase of a step, and the phase that takes the most
    was measured. None of the others took more. So no phase of the other plan takes more than what
    was measured and what, by the plans, the phase takes more than before.
    """
    took = measured - (now.allocated_bytes - now.peak_bytes)
    before = now.timeline.peaks()
    more = max(bytes - before.get(phase, 0) for phase, bytes in plan.timeline.peaks().items())
    said = min(now.first_step, now.steady)
    if more > 0 and took > said:  # of what is more, plans may say too little by the same factor
        more = -(-more * took // said)
    return took + more + plan.total_bytes - plan.peak_bytes
