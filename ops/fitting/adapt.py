"""Spends memory that was measured to be left on faster levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.errors import PlanError

if TYPE_CHECKING:
    from .fitted import Fitted

__all__ = ["adapt"]

TRIES = 3  # plans at most


def adapt(fitted: Fitted) -> bool:
    """Sets faster levels if the measured peak says that there is room for them, and returns whether
    it did. What is set has a plan, and that plan, corrected by how far the last one was from what
    was measured, is within the budget and its margin."""
    if fitted.measured_peak is None or fitted.planner is None:
        return False
    try:
        off = fitted.measured_peak - fitted.planner(fitted.choice).allocated_bytes
    except PlanError:
        return False
    faster = [
        point
        for point in fitted.same_but_levels()
        if point.seconds < fitted.predicted_seconds and point.peak + off <= fitted.within
    ]
    for point in sorted(faster, key=lambda point: point.seconds)[:TRIES]:
        try:
            plan = fitted.planner(point.choice)
        except PlanError:
            continue
        if plan.total_bytes + off <= fitted.within:
            fitted.take(point, plan)
            return True
    return False
