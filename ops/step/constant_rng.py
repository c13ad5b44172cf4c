"""Gives all samples of a batch the same random numbers, so that parts of it have those of the
batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ConstantRandom"]

DRAWS = frozenset(
    "bernoulli_ uniform_ normal_ exponential_ random_ geometric_ cauchy_ log_normal_ rand randn "
    "randint rand_like randn_like randint_like native_dropout".split()
)
"""The ops whose numbers depend on no tensor's values. Others draw as they do."""


class ConstantRandom(TorchDispatchMode):
    """Lets ops that draw random numbers give the same one everywhere: 0.5, or 0 where numbers are
    whole, and masks that keep everything. The generators move as they would."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        drawn = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or name not in DRAWS:
            return drawn
        if name == "native_dropout":
            result, mask = drawn
            share = args[1] if args[2] is not False else 0.0
            return result.copy_(args[0] / (1 - share)), mask.fill_(True)
        return drawn.fill_(0.5 if drawn.is_floating_point() else drawn.dtype == torch.bool)
