"""Texts that are cut to the width of a table, or to what a message or a page can show, and texts
that someone has written in place of a value."""

from __future__ import annotations

from typing import Any

import torch

LONGEST = 240  # characters of a quotation
_WORDS = {"true": True, "false": False, "none": None}


def quoted(value: object, width: int = LONGEST) -> str:
    """Returns the text of a value from elsewhere, such as a file that someone has made up, without
    characters that no font has, and without its middle where it is longer than ``width``."""
    printable = "".join(c if c.isprintable() else " " for c in str(value)[: 4 * width])
    return shortened(printable, width, keep="both")


def shortened(text: str, width: int, keep: str = "end") -> str:
    """Returns text of at most ``width`` characters, with ``..`` in the place of what is left out.

    Of names of modules the end says more than the beginning, which is kept with
    ``keep="beginning"``; ``keep="both"`` leaves out the middle.
    """
    if len(text) <= width:
        return text
    if keep == "both":
        half = (width - 2) // 2
        return text[: width - 2 - half] + ".." + text[len(text) - half :]
    if keep == "beginning":
        return text[: width - 2] + ".."
    return ".." + text[len(text) - (width - 2) :]


def value_of(text: str) -> Any:
    """Returns the truth value, None, dtype of torch or number that a text names, such as that of an
    option on a command line, or else the text."""
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    if isinstance(dtype := getattr(torch, word, None), torch.dtype):
        return dtype
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
