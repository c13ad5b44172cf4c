"""Brings the states of random generators into a file and checks those that come from one."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from .._core.randomness import generator_states
from .._core.text import quoted
from .file import MALFORMED, StateFile, StateFileError


class OtherGenerator(Exception):
    """NumPy draws from a generator of another kind than the saved one."""


def saved_generators() -> dict[str, Any]:
    """Returns the states of all generators that are in use, as a file holds them."""
    states = generator_states()
    version, words, gauss = states["python"]
    states["python"] = version, torch.tensor(words), gauss
    if "cuda" in states:
        states["cuda"] = list(states["cuda"].values())
    return states


def checked_generators(file: StateFile, saved: Any) -> dict[str, Any] | None:
    """Returns the states that a file holds, if any, for :func:`restore_generators`. Each was given
    to a generator that nobody uses, so that none can fail once other things are changed."""
    if saved is None:
        return None
    try:
        version, words, gauss = saved["python"]
        python = (version, tuple(words.tolist()), gauss)
        random.Random(0).setstate(python)
        if gauss is not None and type(gauss) is not float:
            raise ValueError("Python's last normal number is not a number")
        torch.Generator().set_state(saved["torch"])
        cuda = dict(zip(range(torch.cuda.device_count()), saved.get("cuda", ())))
        for index, state in cuda.items():
            torch.Generator(device=f"cuda:{index}").set_state(state)
        if "numpy" in saved and "numpy" in sys.modules:
            _check_numpy_state(saved["numpy"])
        return {**saved, "python": python, "cuda": cuda}
    except OtherGenerator as error:
        raise ValueError(f"{file.path}: {error}; rng=False loads the rest") from None
    except MALFORMED as error:
        raise StateFileError(
            f"the states of random number generators in {file.path} do not load: "
            f"{quoted(error)}; rng=False loads the rest"
        ) from error


def _check_numpy_state(state: Any) -> None:
    numpy = sys.modules["numpy"]
    kind = type(numpy.random.get_state.__self__._bit_generator)
    if state["bit_generator"] != kind.__name__:
        raise OtherGenerator(
            f"NumPy's global generator was a {quoted(state['bit_generator'])} when the state "
            f"was saved, and is a {kind.__name__} here: put in one of the same kind with "
            "numpy.random.set_bit_generator"
        )
    numpy.random.RandomState(kind(0)).set_state(state)
    # NumPy reads its tables at these places without a check.
    for place, end in (("pos", 624), ("buffer_pos", 4)):
        value = state["state"].get(place, state.get(place, 0))
        if not 0 <= value <= end:
            raise ValueError(f"NumPy's generator is at place {quoted(value)} of {end}")
