"""The errors of fitting."""

from __future__ import annotations

from typing import Any

__all__ = ["DoesNotFit"]


class DoesNotFit(ValueError):
    """No choice trains the model within the budget. Says which floor was hit and what would help.

    Attributes:
        least: the bytes that the leanest choice takes, by its plan.
        by_kind: its bytes at the peak, by kind.
        samples: the most samples of a batch with which a choice would fit, by its plan; None if not
            even one does, or smaller batches were not looked at.
    """

    def __init__(
        self, message: str, least: int, by_kind: dict[str, int], samples: int | None = None
    ) -> None:
        super().__init__(message)
        self.least, self.by_kind, self.samples = least, by_kind, samples

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.least, self.by_kind, self.samples)
