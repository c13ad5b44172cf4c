"""What a search for a choice finds, and what is the same to it."""

from __future__ import annotations

from dataclasses import dataclass

from ..techniques.choice import Choice

__all__ = ["SAME", "Choice", "FrontierPoint"]

SAME = 0.002
"""The share of bytes or seconds below which two choices are no different in a report."""


@dataclass(frozen=True)
class FrontierPoint:
    """A choice that no other beats in both.

    Attributes:
        peak: bytes of a step on its device, estimated from plans.
        seconds: of a step, estimated.
        choice: how.
        host: bytes on the host, estimated.
    """

    peak: int
    seconds: float
    choice: Choice
    host: int = 0
