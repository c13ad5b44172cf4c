"""Texts of files from elsewhere, cut to a length that a page can show, and stored once."""

from __future__ import annotations

from collections.abc import Sequence

from .._core.text import shortened as text_of_width

__all__ = ["LONGEST", "Texts", "shortened"]

LONGEST = 240  # characters of a name or a line
DEEPEST = 24  # lines of a stack


def shortened(text: str, length: int = LONGEST) -> str:
    """Returns the text without characters that no font has, and without its middle where it is
    longer than ``length``."""
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * length])
    return text_of_width(printable, length, keep="both")


class Texts:
    """Strings and stacks by number. A stack is a list of numbers of strings."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self.stacks: list[list[int]] = []
        self._strings: dict[str, int] = {}
        self._stacks: dict[tuple[str, ...], int] = {}

    def number(self, text: str) -> int:
        text = shortened(text)
        if text not in self._strings:
            self._strings[text] = len(self.strings)
            self.strings.append(text)
        return self._strings[text]

    def optional(self, text: str | None) -> int | None:
        return None if text is None else self.number(text)

    def stack(self, lines: Sequence[str]) -> int:
        key = tuple(lines[:DEEPEST])
        if key not in self._stacks:
            self._stacks[key] = len(self.stacks)
            self.stacks.append([self.number(line) for line in key])
        return self._stacks[key]
