"""Draws the random numbers of a batch again for its parts."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..state.generators import generator_states, restore_generators

__all__ = ["Replay"]

DRAWS = frozenset(
    "bernoulli_ uniform_ normal_ exponential_ random_ geometric_ cauchy_ log_normal_ rand randn "
    "randint rand_like randn_like randint_like native_dropout".split()
)
"""The ops that can be run again: the numbers that they draw depend on no tensor's values."""


class Replay(TorchDispatchMode):
    """Gives each sample the random numbers, such as a mask of dropout, that it got in the batch.

    An op of a part is run as it was for the batch, with the generator in the same state, and its
    part of the result is taken. Generators so move as they did for the batch, and what a checkpoint
    runs again gets its numbers again.

    Args:
        samples: of the batch.
        device: that it is on.

    Attributes:
        is_exact: whether all numbers that were drawn for parts are those of the batch.
    """

    def __init__(self, samples: int, device: torch.device) -> None:
        super().__init__()
        self._samples, self._device = samples, device
        self._part: tuple[int, int] | None = None  # the first sample and their number
        self._drawn: dict[Any, Tensor] = {}  # by op and state of the generator; without values
        self._start = generator_states()
        self._end: tuple[float, ...] = ()
        self.is_exact = True

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Runs a block, and notes what it draws."""
        with self:
            yield
        self._end = self._next()

    @contextmanager
    def of_part(self, start: int, samples: int) -> Iterator[None]:
        """Runs a block for some samples, with the numbers that these got in the batch."""
        restore_generators(self._start)
        self._part = start, samples
        with self:
            yield
        self.is_exact &= self._next() == self._end

    def _next(self) -> tuple[float, ...]:
        """Draws a number from each generator, which tells whether they are where they were."""
        numpy = sys.modules.get("numpy")
        drawn = torch.rand((), dtype=torch.float64, device=self._device)
        cpu = torch.rand((), dtype=torch.float64, device="cpu")
        return random.random(), float(drawn), float(cpu), numpy.random.random() if numpy else 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        like = next((x for x in args if isinstance(x, Tensor)), None)
        device = torch.device(kwargs.get("device") or "cpu") if like is None else like.device
        generator = kwargs.get("generator")
        if generator is None:
            generator = torch.default_generator
            if device.type == "cuda":
                generator = torch.cuda.default_generators[
                    torch.cuda.current_device() if device.index is None else device.index
                ]
        state = _state(generator)
        drawn = self._drawn.get((func, state))
        if self._part is not None and drawn is not None:
            return self._again(func, drawn, args, kwargs)
        result = func(*args, **kwargs)
        if _state(generator) != state:
            if self._part is None:
                first = result[0] if isinstance(result, tuple) else result
                self._drawn[func, state] = torch.empty_strided(
                    first.shape, first.stride(), dtype=first.dtype, device="meta"
                )
            else:  # where the batch drew nothing
                self.is_exact = False
        return result

    def _again(self, func: Any, like: Tensor, args: tuple[Any, ...], kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if name not in DRAWS or any(isinstance(arg, Tensor) for arg in args[1:]):
            self.is_exact = False
            return func(*args, **kwargs)
        if x is None:
            size = next(torch.Size(arg) for arg in args if isinstance(arg, (list, tuple)))
            given = tuple(like.shape if isinstance(arg, (list, tuple)) else arg for arg in args)
        else:
            size = x.shape
            # Numbers are drawn in the order of memory.
            whole = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device)
            given = (whole.fill_(1), *args[1:])
        drawn = func(*given, **kwargs)
        if name == "native_dropout":
            assert x is not None
            factors, kept = (self._cut(one, size) for one in drawn)
            return x * factors, kept
        drawn = self._cut(drawn, size)
        return x.copy_(drawn) if x is not None and name.endswith("_") else drawn.contiguous()

    def _cut(self, whole: Tensor, size: torch.Size) -> Tensor:
        """Returns what the samples of the part have of what was drawn for the batch."""
        assert self._part is not None
        start, samples = self._part
        if whole.shape == size:
            return whole
        differs = [d for d, (a, b) in enumerate(zip(whole.shape, size)) if a != b]
        if whole.dim() == len(size) and len(differs) == 1:
            (dim,) = differs
            each, rest = divmod(whole.shape[dim], self._samples)
            if rest == 0 and size[dim] == each * samples:
                return whole.narrow(dim, each * start, each * samples)
        self.is_exact = False
        return whole.new_zeros(size)


def _state(generator: torch.Generator) -> tuple[str, bytes]:
    state = generator.get_state()
    return str(generator.device), ctypes.string_at(state.data_ptr(), state.nbytes)
