"""The errors of fitting."""

from __future__ import annotations

__all__ = ["DoesNotFit"]


class DoesNotFit(ValueError):
    """No choice trains the model within the budget. Says which floor was hit and what would help.

    Attributes:
        least: the bytes that the leanest choice takes.
        by_kind: its bytes at the peak, by kind.
    """

    def __init__(self, message: str, least: int, by_kind: dict[str, int]) -> None:
        super().__init__(message)
        self.least, self.by_kind = least, by_kind

    def __reduce__(self) -> tuple[type, tuple[str, int, dict[str, int]]]:
        return type(self), (str(self), self.least, self.by_kind)
