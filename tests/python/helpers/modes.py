"""Every optimizer of headroom.optim in every mode, for what holds for all of them, and a model with
parameters of every sort to train with them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import headroom
import torch
from headroom._core.weight_modes import mode_of
from headroom.optim import (
    SGD,
    Adafactor,
    Adam,
    Adam8bit,
    AdamW,
    AdamW8bit,
    Lion,
    Lion8bit,
    Muon,
    Muon8bit,
    SGD8bit,
)
from torch import nn
from torch.nn.functional import cross_entropy

from helpers import training

WEIGHTS = [  # how weights of 16 bits are stored, if not rounded to the nearest
    dict(master="f32"),
    dict(master="remainder16"),
    dict(master="remainder8"),
    dict(master="remainder8", rounding="stochastic"),
    dict(rounding="stochastic"),
    dict(rounding="kahan"),
]


class Mode(NamedTuple):
    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]

    @property
    def params(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the parameters that it is for. bfloat16 is one of them always."""
        return mode_of(self.options).params

    @property
    def plain(self) -> Mode:
        """The same, with nothing kept beside weights."""
        dropped = ("master", "rounding")
        return Mode(self.cls, {k: v for k, v in self.options.items() if k not in dropped})

    def make(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        if getattr(self.cls, "takes_model", False):  # bare parameters do not say what they are
            params = list(params)
            params = [
                {"params": [p for p in params if (p.dim() in (2, 3)) is use], "use_muon": use}
                for use in (True, False)
            ]
        return self.cls(params, **copy.deepcopy(self.options) | options)


ADAM = {"lr": 1e-2, "eps": 1e-4}  # which float16 moments can be added to
SMALL = ADAM | {"min_8bit_size": 64}
MUON = {"lr": 1e-2, "adamw": {"eps": 1e-4}, "workspace": 40_000}
MUON8BIT = MUON | {"min_8bit_size": 64}
IN_EVERY_WAY = {
    "adamw": Mode(AdamW, ADAM),
    "adam-amsgrad": Mode(Adam, ADAM | {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    "adamw8bit": Mode(AdamW8bit, SMALL),
    "sgd": Mode(SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd-plain": Mode(SGD, {"lr": 0.05}),
    "lion": Mode(Lion, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd8bit": Mode(SGD8bit, {"lr": 1e-2, "momentum": 0.9, "min_8bit_size": 64}),
    "lion8bit": Mode(Lion8bit, {"lr": 1e-2, "weight_decay": 0.1, "min_8bit_size": 64}),
    "adafactor": Mode(Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "adafactor-hf-momentum": Mode(Adafactor, {"semantics": "hf", "beta1": 0.9}),
}
EVERY = (
    IN_EVERY_WAY
    | {
        "-".join([name, *way.values()]): Mode(mode.cls, mode.options | way | {"seed": 7})
        for name, mode in IN_EVERY_WAY.items()
        for way in WEIGHTS
    }
    | {
        "muon": Mode(Muon, MUON),
        "muon-kahan": Mode(Muon, MUON | {"rounding": "kahan", "nesterov": False}),
        "muon-f32": Mode(Muon, MUON | {"master": "f32", "ns_dtype": "float32"}),
        "muon8bit-remainder16": Mode(Muon8bit, MUON8BIT | {"master": "remainder16"}),
        "muon8bit-stochastic": Mode(Muon8bit, MUON8BIT | {"rounding": "stochastic", "seed": 7}),
        "adamw-tensor-lr": Mode(AdamW, ADAM | {"lr": torch.tensor(1e-2)}),
        "adamw-f32-moments": Mode(AdamW, ADAM | {"state_dtype": torch.float32}),
        "adamw-bf16-moments": Mode(AdamW, ADAM | {"state_dtype": torch.bfloat16}),
        "adam-amsgrad-f16-moments": Mode(
            Adam, ADAM | {"state_dtype": torch.float16, "amsgrad": True}
        ),
        "adam8bit": Mode(
            Adam8bit,
            SMALL | {"weight_decay": 0.1, "block_size": 64, "nonfinite": "skip_element"},
        ),
        "adam8bit-stochastic": Mode(
            Adam8bit,
            SMALL | {"block_size": 128, "code_rounding": "stochastic", "nonfinite": "propagate"},
        ),
        "adamw8bit-stochastic-both": Mode(
            AdamW8bit,
            SMALL | {"code_rounding": "stochastic", "rounding": "stochastic", "seed": 2**32 - 1},
        ),
        "adamw8bit-bnb": Mode(AdamW8bit, SMALL | {"bnb_exact": True}),
        "adafactor-maximize": Mode(Adafactor, {"lr": torch.tensor(1e-2), "maximize": True}),
        "adafactor-hf": Mode(Adafactor, {"semantics": "hf", "warmup_init": True}),
        "adafactor-hf-lr": Mode(
            Adafactor,
            {"semantics": "hf", "lr": 1e-2, "scale_parameter": False, "relative_step": False},
        ),
    }
)


class Model(nn.Module):
    """A tied weight, an empty one, a scalar, one of three dimensions, rows of one block and less,
    and a norm, which is kept in float32. Some have too few elements for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 9)
        self.norm = nn.LayerNorm(9)
        self.mix = nn.Parameter(torch.randn(2, 9, 9) / 9)
        self.inner = nn.Linear(9, 256)
        self.scale = nn.Parameter(torch.ones(()))
        self.outer = nn.Linear(256, 9)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(9, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        x = x + (x @ self.mix).sum(0)
        x = x + self.outer(self.inner(x).tanh() * self.scale)
        return self.head(x) + self.empty.sum()


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return headroom.cast_model(Model(), dtype)


def batch(number: int) -> torch.Tensor:
    return torch.randint(13, (6,), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).float(), tokens.roll(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> None:
    training.train(optimizer, steps, lambda step: loss_of(model, batch(step)).backward())


def entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
