"""The error of state files, and what reading a forged one may raise."""

from __future__ import annotations

__all__ = ["MALFORMED", "StateFileError", "shortened"]

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
        super().__init__(shortened(message, 1000))  # it may quote the file


def shortened(value: object, length: int = 200) -> str:
    """Returns the text of a value from a file, which may be long, for a message."""
    text = str(value)
    return text if len(text) <= length else text[:length] + "..."
