"""Norms of rows, recognized by what they compute.

Names say little: a class called RMSNorm may add one to its weight, round before it multiplies, or
normalize other dimensions. So a candidate is called with rows of several sizes and weights of our
choice, and its results are compared with those of each rule in float64.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import nn as ours
from .._core.registration import FLOATS
from .._core.rows import autocast_dtype
from .._core.surroundings import DEVICES, is_plain, takes_ops
from ..functional.norm import CASTINGS, layer_norm, rms_norm

NAME = re.compile(r"norm|rms|ln$", re.IGNORECASE)
EPS_NAMES = (
    "eps",
    "variance_epsilon",
    "epsilon",
    "norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
)
EPS_VALUES = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0)  # of classes that keep it in their code
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are
RANKS = (2, 3, 4)
TOLERANCE = 8  # roundings of a result, at most
LOW_TOLERANCE = 32  # in 16 bits, where some compute everything in these


@dataclasses.dataclass(frozen=True)
class NormRule:
    """Says what a norm computes.

    Attributes:
        kind: "RMSNorm" or "LayerNorm".
        eps: the name of its attribute, or its value.
        offset, casting: as in :func:`headroom.functional.rms_norm`.
        ranks: numbers of dimensions of inputs that it normalizes over the last.
        dtypes: of inputs and weights with which it computes this.
        autocast: on which devices autocast leaves the dtype of its result alone.
    """

    kind: str
    eps: str | float
    offset: float = 0.0
    casting: str = "once"
    ranks: tuple[int, ...] = RANKS
    dtypes: tuple[torch.dtype, ...] = FLOATS
    autocast: tuple[str, ...] = ()


def is_norm(module: nn.Module) -> bool:
    """Returns whether a module may be a norm of rows, which :func:`recognized_norm` finds out: one
    with a weight, and perhaps a bias, of one dimension, or torch's without any."""
    if isinstance(module, (ours.RMSNorm, ours.LayerNorm, nn.GroupNorm)):
        return False
    if not NAME.search(type(module).__name__) or module._modules or module._buffers:
        return False
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if not given:
        return isinstance(getattr(module, "normalized_shape", None), tuple)
    sizes = {tuple(p.shape) for p in given.values()}
    return given.keys() <= {"weight", "bias"} and len(sizes) == 1 and len(sizes.pop()) == 1


def _columns(module: nn.Module) -> int | None:
    for p in module._parameters.values():
        if p is not None:
            return p.numel()
    shape = getattr(module, "normalized_shape", ())
    return shape[0] if len(shape) == 1 else None


def _epsilons(module: nn.Module) -> Iterator[str | float]:
    for name in EPS_NAMES:
        if isinstance(vars(module).get(name), (int, float)):
            yield name
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        yield torch.finfo(torch.float32).eps
    yield from EPS_VALUES


def _eps(module: nn.Module, eps: str | float) -> float:
    return getattr(module, eps) if isinstance(eps, str) else eps


# ---- Probes ------------------------------------------------------------------------------------


def _rows(columns: int) -> Tensor:
    """Returns eight rows: large and small ones, of which eps changes some, one with a value far
    from the others, and some far from zero."""
    generator = torch.Generator("cpu").manual_seed(columns)
    x = torch.randn(8, columns, generator=generator, **CPU)
    scales = torch.tensor([1.0, 1e-3, 30.0, 1e-6, 3e-4, 0.1, 1e-2, 1.0], **CPU)
    means = torch.tensor([0.0, 1e-3, 15.0, 0.0, 0.0, 0.3, 0.0, -2.0], **CPU)
    x = x * scales[:, None] + means[:, None]
    x[5, columns // 2] = 50.0
    return x


def _vectors(columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(columns + 1)
    return (
        torch.rand(columns, generator=generator, **CPU) * 6 - 2,
        torch.randn(columns, generator=generator, **CPU),
    )


class _Own(nn.Module):
    """Calls the forward of a module without the module's hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return type(self.module).forward(self.module, *args)


class _Probe:
    """Calls a module with weights of our choice, in one dtype."""

    def __init__(self, module: nn.Module, columns: int, dtype: torch.dtype, device: Any) -> None:
        self.module, self.caller = module, _Own(module)
        self.x = _rows(columns).to(device, dtype)
        given = dict(zip(("weight", "bias"), _vectors(columns)))
        held = {k for k, p in module._parameters.items() if p is not None}
        self.vectors = {f"module.{k}": v.to(device, dtype) for k, v in given.items() if k in held}
        self.weight = self.vectors.get("module.weight")
        self.bias = self.vectors.get("module.bias")

    def own(self, rank: int) -> Tensor | None:
        """Returns the result of the module for its input in ``rank`` dimensions, as rows, or
        None."""
        shape = {2: (8,), 3: (2, 4), 4: (2, 2, 2)}[rank]
        x = self.x.reshape(*shape, -1)
        try:
            with torch.no_grad():
                y = functional_call(self.caller, self.vectors, (x.clone(),))
        except Exception:
            return None
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return None
        return y.reshape(self.x.shape)

    def exact(self, rule: NormRule) -> tuple[Tensor, Tensor]:
        """Returns the result of a rule in float64, and the size of what a rounding changes."""
        x, eps = self.x.double(), _eps(self.module, rule.eps)
        one = torch.ones((), dtype=torch.float64, device=x.device)
        w = one if self.weight is None else self.weight.double()
        b = 0 * one if self.bias is None else self.bias.double()
        if rule.kind == "RMSNorm":
            y = x * (x.square().mean(-1, True) + eps).rsqrt() * (w + rule.offset)
            return y, y.abs()
        rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        y = (x - x.mean(-1, True)) * rstd * w + b
        return y, y.abs() + b.abs() + x.abs().amax(-1, True) * rstd * w.abs()

    def computed(self, rule: NormRule) -> Tensor:
        eps = _eps(self.module, rule.eps)
        w = self.weight
        if rule.kind == "LayerNorm":
            return layer_norm(self.x, w, self.bias, eps)  # type: ignore[return-value]
        return rms_norm(self.x, w, eps, offset=rule.offset, casting=rule.casting)  # type: ignore[return-value]

    def fits(self, y: Tensor, rule: NormRule, roundings: float) -> bool:
        exact, size = self.exact(rule)
        info = torch.finfo(y.dtype)
        allowed = roundings * info.eps * (size + info.smallest_normal)
        return y.dtype == self.x.dtype and bool(((y.double() - exact).abs() <= allowed).all())


def _candidates(module: nn.Module) -> Iterator[NormRule]:
    offsets = (0.0, 1.0) if module._parameters.get("weight") is not None else (0.0,)
    for eps in _epsilons(module):
        if module._parameters.get("bias") is None:
            yield from (NormRule("RMSNorm", eps, offset) for offset in offsets)
        yield NormRule("LayerNorm", eps)


def _with_casting(low: _Probe, y: Tensor, rule: NormRule) -> NormRule:
    """Returns the rule that rounds where the module does."""
    if rule.kind == "LayerNorm":
        return rule
    rules = [dataclasses.replace(rule, casting=casting) for casting in CASTINGS]
    return min(rules, key=lambda r: int((low.computed(r) != y).sum()))


def recognized_norm(module: nn.Module) -> NormRule | str:
    """Returns what a norm computes, or why it is not swapped."""
    columns = _columns(module)
    if columns is None:
        return "it normalizes more than the last dimension"
    held = next((p for p in module._parameters.values() if p is not None), None)
    dtype, device = (
        (torch.float32, torch.device("cpu")) if held is None else (held.dtype, held.device)
    )
    if dtype not in FLOATS:
        return f"its dtype is {dtype}"
    if device.type not in DEVICES:
        return f"there are no kernels for {device.type}"
    if device.type == "meta":
        device = torch.device("cpu")  # the weights that it is tried with are not its own
    unknown = "it computes neither an RMSNorm nor a LayerNorm over the last dimension"
    full = _Probe(module, columns, torch.float32, device)
    with torch.autocast(device.type, enabled=False):
        results = {rank: full.own(rank) for rank in RANKS}
    ranks = tuple(rank for rank, y in results.items() if y is not None)
    if 3 not in ranks:
        return unknown
    for rule in _candidates(module):
        if all(y is None or full.fits(y, rule, TOLERANCE) for y in results.values()):
            break
    else:
        return unknown
    low_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    low = _Probe(module, columns, low_dtype, device)
    with torch.autocast(device.type, enabled=False):
        y = low.own(3)
    rule = dataclasses.replace(rule, ranks=ranks)
    if y is None or not low.fits(y, rule, LOW_TOLERANCE):
        if dtype == torch.float32:  # some raise in 16 bits, or compute something else
            return dataclasses.replace(rule, dtypes=(torch.float32,))
        return f"in {low_dtype} it computes something else than in float32"
    rule = _with_casting(low, y, rule)
    with torch.autocast(device.type, dtype=low_dtype):
        y = low.own(3)
    if y is not None and y.dtype == low_dtype:
        rule = dataclasses.replace(rule, autocast=(device.type,))
    return rule


# ---- The forward of a swapped norm ---------------------------------------------------------------


def norm_forward(module: nn.Module, rule: NormRule, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the forward of a norm."""
    if len(args) != 1 or kwargs or not _takes(module, rule, args[0]):
        return type(module).forward(module, *args, **kwargs)
    x = args[0]
    weight, eps = getattr(module, "weight", None), _eps(module, rule.eps)
    if rule.kind == "LayerNorm":
        return layer_norm(x, weight, getattr(module, "bias", None), eps)
    return rms_norm(x, weight, eps, offset=rule.offset, casting=rule.casting)


def _takes(module: nn.Module, rule: NormRule, x: Any) -> bool:
    """Returns whether the op takes ``x``, and weight and bias are like it. Where dtypes differ, and
    under autocast, modules differ in the dtypes of their results."""
    if not takes_ops(x, rule.ranks):
        return False
    for name in ("weight", "bias"):
        vector = getattr(module, name, None)
        if vector is not None and (
            not is_plain(vector)
            or vector.dtype != x.dtype
            or vector.device != x.device
            or vector.shape != x.shape[-1:]
        ):
            return False
    kind = x.device.type
    if x.dtype not in rule.dtypes:
        return False
    return x.dtype == torch.float32 or autocast_dtype(kind) is None or kind in rule.autocast
