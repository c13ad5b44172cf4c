"""The errors of planning."""

from __future__ import annotations

__all__ = ["PlanError"]


class PlanError(RuntimeError):
    """A step cannot be planned. Says which operation or argument is the reason, and what to do."""
