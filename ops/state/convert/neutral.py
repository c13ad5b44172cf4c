"""Defines the neutral form of a state, which readers make and writers take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._core.weight_modes import RESIDUALS
from .codes import Codes

# The moments that a parameter has, by the rule of its optimizer.
RULES = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),  # of matrices; its other parameters have Adam's
}
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
SQUARES = ("exp_avg_sq", "max_exp_avg_sq")  # never negative
# What Headroom keeps beside the moments: bits of 16-bit weights, and means of NorMuon's rows.
BESIDE = (*RESIDUALS, "row_var")


@dataclass
class State:
    """Holds the state of one parameter, of any library."""

    step: float
    moments: dict[str, Tensor | Codes]  # some of MOMENTS; none of SGD without momentum
    beside: dict[str, Tensor] = field(default_factory=dict)  # some of BESIDE
    others: list[str] = field(default_factory=list)  # parts that no other library has

    def copied(self) -> State:
        moments = {name: moment.clone() for name, moment in self.moments.items()}
        beside = {name: tensor.clone() for name, tensor in self.beside.items()}
        return replace(self, moments=moments, beside=beside)


@dataclass
class Context:
    """Holds the group, the dtype and the options that a reader or a writer needs beside a state."""

    group: dict[str, Any]
    rule: str = "adam"  # one of RULES
    dtype: torch.dtype | None = None  # of the parameter
    block_size: int = 256
    min_8bit_size: int = 4096
    casts: bool = False  # the target's loader casts to the parameter's dtype

    def is_8bit(self, moment: Tensor | Codes) -> bool:
        return isinstance(moment, Codes) or moment.numel() >= self.min_8bit_size


class Library(NamedTuple):
    """Reads and writes the states of a library."""

    read: Callable[[dict[str, Any], Context], State]
    write: Callable[[State, Context], dict[str, Any]]
    options: dict[str, Any]  # those of a group that not all libraries have, with defaults
    more: tuple[str, ...] = ()  # options that are carried over if the source has them
    rules: tuple[str, ...] = ("adam",)  # of the optimizers that it has
    casts: bool = False  # the loader casts states to the parameter's dtype


def number_of(value: Any) -> Any:
    """Returns the number in a tensor of one element. For float32, it is the shortest decimal number
    that rounds to it."""
    if not isinstance(value, Tensor):
        return value
    number = value.item()
    short = float(f"{number:.7g}") if isinstance(number, float) else number
    return short if torch.tensor(short, dtype=value.dtype).item() == number else number


def cast(moment: Tensor, context: Context) -> Tensor:
    return moment.to(context.dtype) if context.casts and context.dtype else moment


def step64(state: State) -> Tensor:
    return torch.tensor(float(state.step), dtype=torch.float64)
