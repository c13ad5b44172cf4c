"""Wrong arguments, and what options take: sizes, counts, devices."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from .._core.sizes import parse_bytes

__all__ = ["ArgumentError", "Parser", "count", "size"]


class ArgumentError(ValueError):
    """An argument is wrong, and nothing was done: the command exits with 2."""


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`ArgumentError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


def count(least: int) -> Callable[[str], int]:
    """Returns what makes a whole number of text, and refuses numbers below ``least``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number from {least} on")
        return number

    return read


def size(text: str) -> int:
    """Returns the bytes of text such as "24 GiB"."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"the {error}") from None
