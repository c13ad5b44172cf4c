"""Random numbers of the software device: the CPU draws them from the device's generator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

State = tuple[int, int]  # a generator's seed and offset
_BITS = (1 << 64) - 1


def _mixed(x: int) -> int:
    """Returns 64 bits that depend on all bits of ``x`` (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _BITS
    return x ^ (x >> 31)


def seed(state: State) -> int:
    """Returns the seed of a CPU generator for the draws that begin at ``state``."""
    return _mixed(_mixed(state[1] & _BITS) ^ (state[0] & _BITS))


def generator(state: State) -> torch.Generator:
    """Returns a CPU generator for the draws that begin at ``state``."""
    return torch.Generator().manual_seed(seed(state))


def state_of(given: torch.Generator | None, device: int, captured: bool) -> Callable[[], State]:
    """Returns a function that returns the state from which an operation draws.

    Call it before the operation's CUDA code, which advances the offset. Of a captured operation it
    is called at each replay: torch then keeps the state in memory of the device.
    """
    source = torch.cuda.default_generators[device] if given is None else given
    if not captured:
        return lambda: (source.initial_seed(), source.get_offset())
    at_seed, at_offset, within = source.philox_state(0)
    at_seed, at_offset, within = at_seed.data_ptr(), at_offset.data_ptr(), int(within)

    def replayed() -> State:
        read = ctypes.c_uint64.from_address
        return read(at_seed).value, read(at_offset).value + within

    return replayed


class Seeded:
    """Within, the CPU's default generator draws from ``state``; afterwards it is as it was."""

    def __init__(self, state: State):
        self._state = state

    def __enter__(self) -> None:
        self._before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed(self._state))

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._before)
