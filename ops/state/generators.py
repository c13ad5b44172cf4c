"""Saves and restores the random number generators of Python, torch, CUDA and NumPy."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from .._core.text import quoted
from .file import MALFORMED, StateFile, StateFileError

__all__ = ["checked_generators", "generator_states", "restore_generators"]


class OtherGenerator(Exception):
    """NumPy draws from a generator of another kind than the saved one."""


def generator_states() -> dict[str, Any]:
    """Returns the states of all generators that are in use."""
    version, words, gauss = random.getstate()
    states = {
        "python": (version, torch.tensor(words), gauss),
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Gives the generators the states that :func:`generator_states` returned in this process."""
    for put in _setters(states):
        put()


def _setters(states: dict[str, Any]) -> list[Callable[[], None]]:
    version, words, gauss = states["python"]
    put = [
        functools.partial(random.setstate, (version, tuple(words.tolist()), gauss)),
        functools.partial(torch.set_rng_state, states["torch"]),
    ]
    for index, state in zip(range(torch.cuda.device_count()), states.get("cuda", ())):
        put.append(functools.partial(torch.cuda.set_rng_state, state, index))
    if "numpy" in states and "numpy" in sys.modules:
        put.append(functools.partial(sys.modules["numpy"].random.set_state, states["numpy"]))
    return put


def checked_generators(file: StateFile, states: Any) -> list[Callable[[], None]]:
    """Returns functions that restore the generators. Each state was given to a generator that
    nobody uses, so that none can fail once other things are changed."""
    if states is None:
        return []
    try:
        version, words, gauss = states["python"]
        python = (version, tuple(words.tolist()), gauss)
        random.Random(0).setstate(python)
        if gauss is not None and type(gauss) is not float:
            raise ValueError("Python's last normal number is not a number")
        torch.Generator().set_state(states["torch"])
        for index, state in zip(range(torch.cuda.device_count()), states.get("cuda", ())):
            torch.Generator(device=f"cuda:{index}").set_state(state)
        if "numpy" in states and "numpy" in sys.modules:
            _check_numpy_state(states["numpy"])
        put = _setters(states)
    except OtherGenerator as error:
        raise ValueError(f"{file.path}: {error}; rng=False loads the rest") from None
    except MALFORMED as error:
        raise StateFileError(
            f"the states of random number generators in {file.path} do not load: "
            f"{quoted(error)}; rng=False loads the rest"
        ) from error
    return put


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
