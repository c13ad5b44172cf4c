"""Every optimizer of headroom.optim in a row: how one is made, and what its runs are compared with.
The tests of tests/python/optim/test_optimizer_*.py run for each row, so an optimizer that has one
has them all."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import pytest
import torch
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
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.bits import bits

HF = pytest.importorskip("transformers.optimization").Adafactor
# A step rounds a handful of float32 operations, of the size of the parameter or of the update.
CLOSE = {"rtol": 2**-21, "atol": 2**-24}
EQUAL = {"rtol": 0, "atol": 0}
SHAPES = ((4, 4), (7,), (), (7,))
MATRICES = ((4, 4), (7, 3), (3, 5), (7, 3))


class OnLists(TorchDispatchMode):
    """Lets everything through. A step under it hands the op lists, not addresses."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Row(NamedTuple):
    cls: type[torch.optim.Optimizer]
    options: dict[str, Any] = {}
    theirs: Any = None  # the original, whose arguments, errors and checkpoints are ours
    follows: dict[str, float] = {}  # how near a step is to the original's; empty: not compared
    wide: Any = None  # the class with the same rule and float32 moments
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    by_element: bool = True  # whether a state has the shape of its parameter
    signed: tuple[str, ...] = ()  # states that may be negative
    varied: tuple[dict[str, Any], ...] = ({"lr": 0.05}, {"weight_decay": 0.3}, {"maximize": True})

    @property
    def name(self) -> str:
        return self.cls.__name__ + ("-hf" if self.theirs is HF else "")

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.cls).parameters)

    def make(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        if (
            self.cls in (Muon, Muon8bit)
            and isinstance(params, list)
            and isinstance(params[0], tuple)
        ):
            params = [{"params": params, "use_muon": True}]  # whatever their names say
        return self.cls(params, **copy.deepcopy(self.options) | options)

    def reference(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """Returns the original, or where steps are not compared with it the same optimizer with
        nothing that it could remember."""
        if not self.follows:
            return afresh(self.cls)(params, **copy.deepcopy(self.options) | options)
        return self.theirs(params, foreach=False, **self.options | options)


def afresh(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns an optimizer that makes each step by new ones, on lists, a parameter at a time."""

    class Afresh(cls):
        def step(self):
            groups = [
                {**group, "params": [param]}
                for group in self.param_groups
                for param in group["params"]
            ]
            for group in groups:
                group.pop("param_names", None)
            semantics = {"semantics": self.semantics} if cls is Adafactor else {}
            fresh = cls(groups, **semantics)
            fresh.state = self.state
            with OnLists():
                fresh.step()

    return Afresh


ADAM = {"lr": 1e-2, "weight_decay": 0.1}
CODES = {"min_8bit_size": 0}
VARIED_ADAM = (
    {"lr": 0.1, "betas": (0.5, 0.6)},
    {"weight_decay": 0.0, "maximize": True},
    {"eps": 0.1},
)
AMSGRAD = (*VARIED_ADAM[:2], {"amsgrad": True, "eps": 0.1})
VARIED_LION = ({"betas": (0.5, 0.6)}, {"weight_decay": 0.3}, {"maximize": True})
SGD_OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
LION = {"lr": 1e-2, "weight_decay": 0.1}
MUON = {"lr": 0.02, "workspace": 0}  # products depend by their rounding on what is in their batch
HF_OPTIONS = {"semantics": "hf", "lr": 1e-2, "relative_step": False, "scale_parameter": False}
ROWS = [
    Row(AdamW, ADAM, torch.optim.AdamW, CLOSE, signed=("exp_avg",), varied=AMSGRAD),
    Row(Adam, ADAM, torch.optim.Adam, CLOSE, signed=("exp_avg",), varied=AMSGRAD),
    Row(AdamW8bit, ADAM | CODES, torch.optim.AdamW, wide=AdamW, varied=VARIED_ADAM),
    Row(Adam8bit, ADAM | CODES, torch.optim.Adam, wide=Adam, varied=VARIED_ADAM),
    Row(SGD, SGD_OPTIONS | {"dampening": 0.1}, torch.optim.SGD, CLOSE, signed=("momentum_buffer",)),
    Row(SGD8bit, SGD_OPTIONS | CODES, torch.optim.SGD, wide=SGD),
    Row(Lion, LION, signed=("exp_avg",), varied=VARIED_LION),
    Row(Lion8bit, LION | CODES, wide=Lion),
    Row(Adafactor, {"weight_decay": 0.1}, torch.optim.Adafactor, by_element=False),
    Row(
        Adafactor,
        HF_OPTIONS | {"beta1": 0.9},
        HF,
        by_element=False,
        signed=("exp_avg",),
        varied=({"lr": 0.05}, {"weight_decay": 0.3}, {"decay_rate": -0.6}),
    ),
    Row(
        Muon, MUON, torch.optim.Muon, shapes=MATRICES, by_element=False, signed=("momentum_buffer",)
    ),
    Row(Muon8bit, MUON | CODES, wide=Muon, shapes=MATRICES, by_element=False),
]


def rows(which=lambda row: True):
    """Parametrizes a test by the rows that it is for. AdamW inherits what it does from Adam, so the
    default run asks it of AdamW alone."""
    slow = dict.fromkeys((Adam, Adam8bit), pytest.mark.slow)
    chosen = [
        pytest.param(row, id=row.name, marks=slow.get(row.cls, ())) for row in ROWS if which(row)
    ]
    return pytest.mark.parametrize("row", chosen)


EACH = rows()
WITH_CODES = rows(lambda row: row.wide)


def named(cls):
    return next(row for row in ROWS if row.cls is cls)


class Twins:
    """Two optimizers over parameters of equal values: ours, and its reference. What is done to one
    is done to the other."""

    def __init__(self, row, shapes=None, device="cpu", **options):
        generator = torch.Generator().manual_seed(2)
        start = [torch.randn(s, generator=generator).to(device) for s in shapes or row.shapes]
        self.ours = [torch.nn.Parameter(value.clone()) for value in start]
        self.theirs = [torch.nn.Parameter(value.clone()) for value in start]
        self.row, self.optimizer = row, row.make(self.ours, **options)
        self.other = row.reference(self.theirs, **copy.deepcopy(options))
        self.generator = torch.Generator().manual_seed(1)

    def sides(self):
        return (self.ours, self.optimizer), (self.theirs, self.other)

    def both(self, action):
        """Does action(params, optimizer) to both."""
        for params, optimizer in self.sides():
            action(params, optimizer)

    def random_grads(self, absent=()):
        for k, pair in enumerate(zip(self.ours, self.theirs)):
            grad = torch.randn(pair[1].shape, generator=self.generator, dtype=pair[1].dtype)
            for p in pair:
                p.grad = None if k in absent else grad.to(p.device, copy=True)

    def step(self, count=1, absent=()):
        for _ in range(count):
            self.random_grads(absent)
            self.optimizer.step()
            self.other.step()
        return self

    def check(self, what="", **tolerance):
        """Parameters and states are as the reference has them."""
        tolerance = self.row.follows | tolerance if self.row.follows else EQUAL
        for k, (a, b) in enumerate(zip(self.ours, self.theirs)):
            mine, its = (
                {"itself": p} | dict(o.state.get(p, {}))
                for p, o in ((a, self.optimizer), (b, self.other))
            )
            assert its.keys() <= mine.keys() <= its.keys() | {"step"}, what
            for key, value in its.items():
                torch.testing.assert_close(
                    mine[key],
                    value,
                    **EQUAL if key == "step" else tolerance,
                    equal_nan=True,
                    check_dtype=key != "step",
                    check_device=key != "step",
                    msg=lambda m, at=f"{what}: {key} of parameter {k}": f"{at}: {m}",
                )
        return self


# ---- Runs of one ---------------------------------------------------------------------------------


def start(row, dtype=torch.float32, device="cpu", shapes=None):
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in shapes or row.shapes]
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def set_grads(params, seed):
    """The same for parameters of every dtype: numbers of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.device, p.dtype)


def run(params, optimizer, seeds):
    for seed in seeds:
        set_grads(params, seed)
        optimizer.step()
    return params, optimizer


def trained(row, steps=3, dtype=torch.float32, device="cpu", **options):
    """Returns parameters and their optimizer with a past."""
    params = start(row, dtype, device)
    return run(params, row.make(params, **options), range(steps))


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def entries(optimizer):
    return [optimizer.state.get(p, {}) for p in parameters(optimizer)]


def everything(optimizer):
    """The tensors that the optimizer steps and holds."""
    held = parameters(optimizer) + [v for entry in entries(optimizer) for v in entry.values()]
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]


def frozen(optimizer):
    return [(t.dtype, t.shape, bits(t).clone()) for t in everything(optimizer)]


def assert_frozen(optimizer, before, what=""):
    now = frozen(optimizer)
    assert len(now) == len(before), what
    for a, b in zip(now, before):
        assert a[:2] == b[:2] and torch.equal(a[2], b[2]), what


def options_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["param_groups"])
