"""Defines the modes of storing 16-bit weights: ``master=`` and ``rounding=`` of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .registration import FLOATS

Master = Literal["f32", "remainder16", "remainder8"]  # or None
Rounding = Literal["nearest", "stochastic", "kahan"]
MASTERS = (None, *get_args(Master))
ROUNDINGS = get_args(Rounding)
HALVES = (torch.bfloat16, torch.float16)
RESIDUALS = ("compensation", "master", "remainder")  # their names in a parameter's state


class WeightsMode(NamedTuple):
    """Says how the parameters of a group are stored."""

    number: int  # hr_weights_mode
    residual: str | None = None  # its name in the state
    dtype: torch.dtype | None = None  # of the residual; None: the parameter's
    params: tuple[torch.dtype, ...] = HALVES  # the dtypes of parameters that it is for
    is_random: bool = False


NEAREST = WeightsMode(0, params=FLOATS)
MODES = {
    (None, "nearest"): NEAREST,
    (None, "stochastic"): WeightsMode(1, is_random=True),
    (None, "kahan"): WeightsMode(2, "compensation"),
    ("f32", "nearest"): WeightsMode(3, "master", torch.float32),
    ("remainder16", "nearest"): WeightsMode(4, "remainder", torch.int16, HALVES[:1]),
    ("remainder8", "nearest"): WeightsMode(5, "remainder", torch.int8, HALVES[:1]),
    ("remainder8", "stochastic"): WeightsMode(6, "remainder", torch.int8, HALVES[:1], True),
}


def weights_mode(master: str | None = None, rounding: str = "nearest") -> WeightsMode:
    """Returns the mode of two options.

    Raises:
        ValueError: there is no such mode.
    """
    if master not in MASTERS:
        raise ValueError(f"master must be one of {MASTERS}, got {master!r}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")
    if (master, rounding) not in MODES:
        raise ValueError(
            f"master={master!r} does not go with rounding={rounding!r}: it leaves nothing to round "
            "so. Stochastic rounding goes with master=None or 'remainder8', Kahan with master=None"
        )
    return MODES[master, rounding]


def mode_of(group: dict[str, Any]) -> WeightsMode:
    """Returns the mode of a group's 16-bit parameters. Float32 parameters need none."""
    return weights_mode(group.get("master"), group.get("rounding", "nearest"))


def check_weight_options(options: dict[str, Any]) -> None:
    """Refuses options of a group that do not fit each other, or its parameters."""
    mode = mode_of(options)
    seed = options.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2^32 - 1, got {seed}")
    params = options.get("params", ())
    params = [params] if isinstance(params, Tensor) else params
    for param in params if isinstance(params, Sequence) else ():
        param = param[1] if isinstance(param, tuple) else param
        if isinstance(param, Tensor) and param.dtype in HALVES and param.dtype not in mode.params:
            raise ValueError(
                f"master={options.get('master')!r} needs bfloat16 weights: float16 has fewer "
                f"exponents than float32, so 16 bits more do not complete it. Got {param.dtype}; "
                "use master='f32'"
            )


def weight_seeds(seed: int, places: Iterable[int]) -> list[int]:
    """Returns a seed for every parameter, distinct by its place in the optimizer, which is the same
    on all ranks."""
    return [((seed << 32) + place % 2**32 + 2**63) % 2**64 - 2**63 for place in places]
