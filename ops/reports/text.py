"""Texts of files from elsewhere, stored once."""

from __future__ import annotations

from collections.abc import Sequence

from .._core.text import quoted

__all__ = ["Texts"]

DEEPEST = 24  # lines of a stack


class Texts:
    """Strings and stacks by number. A stack is a list of numbers of strings."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self.stacks: list[list[int]] = []
        self._strings: dict[str, int] = {}
        self._stacks: dict[tuple[str, ...], int] = {}

    def number(self, text: str) -> int:
        text = quoted(text)
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
