"""Says what other levels take, from what was measured of the levels that run."""

from __future__ import annotations

from ...planning.result import Plan

__all__ = ["expected"]


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
