"""Values of options that someone has written as text, on a command line or in a configuration."""

from __future__ import annotations

from typing import Any

import torch

_WORDS = {"true": True, "false": False, "none": None}


def value_of(text: str) -> Any:
    """Returns the truth value, None, dtype of torch or number that a text names, or else the
    text."""
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
