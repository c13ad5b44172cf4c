"""The error of state files, and what reading a forged one may raise."""

from __future__ import annotations

from ..._core.text import shortened

__all__ = ["MALFORMED", "StateFileError"]

# Values of any kind may stand in a header that someone has made up.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


class StateFileError(RuntimeError):
    """A state file is damaged, is not a state file, or is being written by someone else."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, 1000, keep="beginning"))  # it may quote the file
