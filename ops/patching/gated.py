"""Gated units in feed-forward modules, recognized by what they compute.

A candidate has Linears with names that such modules use. It is called once with hooks on its
parts, which look at what each of them gets and put values of our choice in the place of what it
returns. So it is known that the module computes ``down(act(gate(x)) * up(x))`` and nothing else,
which of the activations it is, and where there is dropout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import nn as ours
from .._core.registration import FLOATS
from ..functional.glu import glu
from .calls import CPU, DEVICES, own_forward, takes

__all__ = ["GluRule", "glu_forward", "is_gated", "recognized_glu"]

# Names of the Linears: gate and up, or one for both, and down.
NAMES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("gate", "up"), "down"),
    (("gate_up_proj",), "down_proj"),
    (("gate_up",), "down"),
    (("weights_in",), "weights_out"),
    (("w12",), "w3"),
    (("Wi",), "Wo"),
)
EXACT = {
    "silu": lambda g: g * torch.sigmoid(g),
    "gelu": lambda g: F.gelu(g),
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "relu": lambda g: torch.relu(g),
    "relu_squared": lambda g: torch.relu(g).square(),
}
RANKS = (2, 3)
ROWS = 6
TOLERANCE = 8  # roundings of a product, at most


@dataclasses.dataclass(frozen=True)
class GluRule:
    """What a feed-forward module computes.

    Attributes:
        first: the names of gate and up, or of the Linear that is both.
        down: the name of the last Linear.
        activation: as in :func:`headroom.functional.glu`.
        inner, outer: the names of the dropout in front of ``down`` and behind it, or None.
        ranks: numbers of dimensions of inputs that it takes.
    """

    first: tuple[str, ...]
    down: str
    activation: str = ""
    inner: str | None = None
    outer: str | None = None
    ranks: tuple[int, ...] = RANKS


def _names(module: nn.Module) -> GluRule | None:
    for first, down in NAMES:
        if all(_is_linear(module._modules.get(name)) for name in (*first, down)):
            return GluRule(first, down)
    return None


def _is_linear(module: nn.Module | None) -> bool:
    """Whether it is a Linear, or has taken the place of one, as adapters and 4-bit layers do."""
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return module is not None and all(isinstance(size, int) for size in sizes)


def is_gated(module: nn.Module) -> bool:
    """Returns whether a module may be a gated unit, which :func:`recognized_glu` finds out."""
    return not isinstance(module, ours.MLP) and _names(module) is not None


# ---- Probe -------------------------------------------------------------------------------------


class _Part:
    """What one of the parts of a module got, and the values that take the place of its result."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.got = value, []

    def hook(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Tensor:
        if len(args) != 1 or not isinstance(result, Tensor) or result.shape != self.value.shape:
            raise ValueError("a part is called in another way than a gated unit calls it")
        self.got.append(args[0].clone())
        return self.value

    def got_once(self, x: Tensor) -> bool:
        return len(self.got) == 1 and torch.equal(self.got[0], x)


@contextmanager
def _training(module: nn.Module, mode: bool) -> Iterator[None]:
    """Sets the mode of a module, but not of its parts."""
    before = module.training
    module.training = mode
    try:
        yield
    finally:
        module.training = before


class _Probe:
    """One call of a module with values of our choice in the place of what its parts return."""

    def __init__(
        self, module: nn.Module, rule: GluRule, shape: tuple[int, ...], like: Tensor
    ) -> None:
        self.module = module
        self._generator = torch.Generator("cpu").manual_seed(len(shape))
        self._shape, self._like = shape, like
        self.x = self._random(module._modules[rule.first[0]].in_features)  # type: ignore[union-attr]
        self.first = [_Part(self._wide(module._modules[n].out_features)) for n in rule.first]  # type: ignore[union-attr]
        down = module._modules[rule.down]
        self.inner_size: int = down.in_features  # type: ignore[union-attr]
        self.down = _Part(self._random(down.out_features))  # type: ignore[union-attr]
        self.parts = dict(zip((*rule.first, rule.down), (*self.first, self.down)))
        self.drops: dict[str, _Part] = {}
        self.others: list[Any] = []  # what other parts got

    def _random(self, columns: int) -> Tensor:
        x = torch.randn(*self._shape, columns, generator=self._generator, **CPU)
        return x.to(self._like.device, self._like.dtype)

    def _wide(self, columns: int) -> Tensor:
        """Values from -4 to 4, and some of up to 30, which a clamp would change."""
        x = torch.rand(*self._shape, columns, generator=self._generator, **CPU) * 8 - 4
        far = torch.rand(x.shape, generator=self._generator, **CPU) < 0.1
        return torch.where(far, x * 7.5, x).to(self._like.device, self._like.dtype)

    def run(self, dropouts: dict[str, int]) -> Tensor | None:
        self.drops = {name: _Part(self._random(size)) for name, size in dropouts.items()}
        devices = [self._like.device] if self._like.device.type == "cuda" else []
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(self._like.device.type, enabled=False))
            for name, part in (self.parts | self.drops).items():
                handle = self.module._modules[name].register_forward_hook(part.hook)  # type: ignore[union-attr]
                stack.callback(handle.remove)
            for name, child in self.module._modules.items():
                if child is not None and name not in self.parts and name not in self.drops:
                    handle = child.register_forward_pre_hook(self._look)
                    stack.callback(handle.remove)
            try:
                y = own_forward(self.module, (self.x.clone(),), {})
            except Exception:
                return None
        return y if isinstance(y, Tensor) and y.shape == self.down.value.shape else None

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.others.append(args)

    def others_are_activations(self) -> bool:
        """Whether all other parts that were called got the gate. A part that scales or drops a
        result might do nothing now and something later."""
        gate = self.halves()[0]
        return all(
            len(args) == 1 and isinstance(args[0], Tensor) and torch.equal(args[0], gate)
            for args in self.others
        )

    def halves(self) -> tuple[Tensor, Tensor]:
        values = [part.value for part in self.first]
        gate, up = values if len(values) == 2 else values[0].chunk(2, -1)
        return gate, up

    def activation(self, h: Tensor) -> str | None:
        gate, up = (half.double() for half in self.halves())
        eps = torch.finfo(h.dtype).eps
        # What functions of the error function lose far below zero is measured by the gate.
        slack = 4 * torch.finfo(torch.float32).eps * (gate * up).abs()
        for name, function in EXACT.items():
            exact = function(gate) * up
            allowed = TOLERANCE * eps * exact.abs() + slack * (1 + up.abs())
            if bool(((h.double() - exact).abs() <= allowed).all()):
                return name
        return None


def _dropouts(module: nn.Module, rule: GluRule) -> list[str]:
    return [name for name, child in module._modules.items() if isinstance(child, nn.Dropout)]


def _find(module: nn.Module, rule: GluRule, shape: tuple[int, ...], like: Tensor) -> GluRule | None:
    """The rule for inputs of one shape, or None."""
    names = _dropouts(module, rule)
    for positions in {(): ((),), 1: (("inner",), ("outer",))}.get(len(names) or (), ()):
        place = dict(zip(positions, names))
        probe = _Probe(module, rule, shape, like)
        sizes = {"inner": probe.inner_size, "outer": probe.down.value.shape[-1]}
        y = probe.run({name: sizes[position] for position, name in place.items()})
        if y is None or not all(part.got_once(probe.x) for part in probe.first):
            continue
        if not probe.others_are_activations():
            continue
        last = probe.drops[place["outer"]] if "outer" in place else probe.down
        h_part = probe.drops[place["inner"]] if "inner" in place else probe.down
        chained = not torch.equal(y, last.value) or len(h_part.got) != 1
        if chained or ("outer" in place and not last.got_once(probe.down.value)):
            continue
        if "inner" in place and not probe.down.got_once(h_part.value):
            continue
        h = h_part.got[0]
        if h.dtype != like.dtype or h.shape != probe.halves()[0].shape:
            continue
        activation = probe.activation(h)
        if activation is not None:
            return dataclasses.replace(rule, activation=activation, **place)
    return None


def _hooked(module: nn.Module) -> bool:
    return any(
        hooks
        for child in module.modules()
        if child is not module
        for hooks in (
            child._forward_hooks,
            child._forward_pre_hooks,
            child._backward_hooks,
            child._backward_pre_hooks,
        )
    )


def recognized_glu(module: nn.Module) -> GluRule | str:
    """Returns what a feed-forward module computes, or why it is not swapped."""
    rule = _names(module)
    assert rule is not None
    if _hooked(module):
        return "a part of it has hooks, which a trial would call"
    parts = {getattr(module, name) for name in (*rule.first, rule.down)}
    others = [module._parameters, module._buffers]
    others += [[*p.parameters(), *p.buffers()] for p in module.children() if p not in parts]
    if any(others):
        return "it has parameters or buffers besides those of its Linears"
    tensors = [*module.parameters()]
    if any(hasattr(p, "device_mesh") for p in tensors):
        return "its weights are DTensors"
    if any(p.device.type == "meta" for p in tensors):
        return "its weights are on the meta device, so what it computes cannot be tried"
    held = next((p for p in tensors if p.is_floating_point()), None)
    if held is None or held.dtype not in FLOATS:
        return f"its dtype is {tensors[0].dtype if held is None else held.dtype}"
    if held.device.type not in DEVICES:
        return f"there are no kernels for {held.device.type}"
    found: dict[int, GluRule] = {}
    for rank, shape in ((2, (ROWS,)), (3, (2, ROWS // 2))):
        rules = set()
        for mode in (True, False):
            with _training(module, mode):
                rules.add(_find(module, rule, shape, held))
        if len(rules) == 1 and None not in rules:
            found[rank] = rules.pop()
    if not found or len(set(found.values())) != 1:
        return "it does not compute down(act(gate(x)) * up(x)) with an activation of headroom's glu"
    return dataclasses.replace(next(iter(found.values())), ranks=tuple(found))


# ---- The forward of a swapped module -----------------------------------------------------------


def glu_forward(module: nn.Module, rule: GluRule, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the forward of a feed-forward module with a gated unit."""
    if len(args) != 1 or kwargs or not takes(args[0], rule.ranks) or not _same_dtypes(module, rule):
        return own_forward(module, args, kwargs)
    first = [getattr(module, name)(args[0]) for name in rule.first]
    h = glu(*first, activation=rule.activation, packed=len(first) == 1)
    if rule.inner is not None:
        h = getattr(module, rule.inner)(h)
    y = getattr(module, rule.down)(h)
    return y if rule.outer is None else getattr(module, rule.outer)(y)


def _same_dtypes(module: nn.Module, rule: GluRule) -> bool:
    """Whether the Linears are of one dtype. Some modules cast between them, to keep one of them in
    float32."""
    weights = (getattr(getattr(module, name), "weight", None) for name in (*rule.first, rule.down))
    return len({weight.dtype for weight in weights if isinstance(weight, Tensor)}) <= 1
