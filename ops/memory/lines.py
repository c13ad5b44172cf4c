"""Lines of the user's Python as short text: what allocations and saved tensors are told by."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import CodeType

import torch

__all__ = ["DEPTH", "Place", "is_inner", "line_of", "lines_at", "place_here"]

DEPTH = 8  # lines that are kept
_INNER = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    str(Path(__file__).parents[1] / "step") + os.sep,
    str(Path(__file__).parents[2] / "headroom_rehearsal") + os.sep,  # what computes in its place
    "<",
    "torch/",  # below the folder of sys.path that it was imported from
    "headroom/memory/",
    "headroom/step/",
    "headroom_rehearsal/",
)

Place = tuple[tuple[CodeType, int], ...]
"""Functions and the instructions that they are at, innermost first."""


def is_inner(path: str) -> bool:
    """Returns whether a file is of torch or of this package, and no line of the user's."""
    return path.startswith(_INNER)


def line_of(path: str, number: int, function: str) -> str:
    """Returns ``folder/file.py:12 function``."""
    return f"{os.sep.join(path.split(os.sep)[-2:])}:{number} {function}"


def place_here() -> Place:
    """Returns where the user's code is, at the cost of a microsecond or few: without text."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < DEPTH:
        code = frame.f_code
        if not _is_inner(code):
            found.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def lines_at(place: Place) -> tuple[str, ...]:
    """Returns the lines of a place as text."""
    return tuple(_text(*each) for each in place)


@cache
def _is_inner(code: CodeType) -> bool:
    return is_inner(code.co_filename)


@cache
def _text(code: CodeType, instruction: int) -> str:
    number = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            number = line
    return line_of(code.co_filename, number, code.co_name)
