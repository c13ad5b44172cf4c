"""The error of a step that cannot be run as it is described."""

from __future__ import annotations

__all__ = ["PlanError"]


class PlanError(RuntimeError):
    """A step cannot be planned. Says which operation or argument is the reason, and what to do."""
