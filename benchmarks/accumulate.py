"""Gradients added to f32 buffers: a GradAccumulator on a model, the op alone beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ._model import OP_ONLY, Shapes, filled_like, model_for
from .harness import Bar, Case, Contender, Rotation, sets_needed

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Data(NamedTuple):
    sums: list[torch.Tensor]
    losts: list[torch.Tensor]
    grads: list[torch.Tensor]


@dataclass
class Layout:
    shapes: Shapes
    dtype: torch.dtype
    compensated: bool = False
    zero_grads: bool = False

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def bytes_moved(self) -> int:
        """Reads the gradients and the sums, and writes the sums."""
        per_element = self.dtype.itemsize * (2 if self.zero_grads else 1)
        per_element += 2 * 4 * (2 if self.compensated else 1)
        return self.numel * per_element

    def allocate(self, device: torch.device) -> Data:
        def tensors(dtype):
            return filled_like(self.shapes, dtype, device)

        losts = [t.zero_() for t in tensors(F32)] if self.compensated else []
        return Data(tensors(F32), losts, tensors(self.dtype))

    def rotation(self, device: torch.device) -> Rotation:
        held = self.numel * (4 + self.dtype.itemsize)
        return Rotation([self.allocate(device) for _ in range(sets_needed(held, device))])


def headroom_op(data: Rotation, zero_grads: bool = False) -> Contender:
    import headroom

    def call():
        d = data.next()
        headroom.functional.accumulate_(d.sums, d.grads, losts=d.losts, zero_grads=zero_grads)

    return Contender(call)


def headroom_add(data: Rotation, compensated: bool = False) -> Contender:
    """`GradAccumulator.add()`, which takes each gradient from its parameter."""
    import headroom

    pairs = {}
    for d in data.sets:
        params = [torch.nn.Parameter(grad.clone()) for grad in d.grads]
        pairs[id(d)] = params, headroom.GradAccumulator(params, compensated=compensated)
    chosen = None

    def give():
        nonlocal chosen
        chosen = data.next()
        for param, grad in zip(pairs[id(chosen)][0], chosen.grads):
            param.grad = grad

    return Contender(lambda: pairs[id(chosen)][1].add(), prepare=give)


def torch_foreach(data: Rotation, zero_grads: bool = False) -> Contender:
    """The plain sum, whether ours is compensated or not: torch has no other."""

    def call():
        d = data.next()
        torch._foreach_add_(d.sums, d.grads)
        if zero_grads:
            torch._foreach_zero_(d.grads)

    return Contender(call)


def torch_widened(data: Rotation) -> Contender:
    """Through an f32 copy of each gradient: on the CPU the faster way where dtypes differ."""

    def call():
        d = data.next()
        for total, grad in zip(d.sums, d.grads):
            total.add_(grad.float())

    return Contender(call)


def case(name: str, what: str, layout: Layout, *bars: Bar) -> Case:
    def setup(device):
        data = layout.rotation(device)
        factories = {
            "headroom": lambda: headroom_add(data, layout.compensated),
            OP_ONLY: lambda: headroom_op(data, layout.zero_grads),
            "torch": lambda: torch_foreach(data, layout.zero_grads),
        }
        if layout.dtype != F32 and not layout.zero_grads:
            factories["torch, widened"] = lambda: torch_widened(data)
        return factories

    return Case(name, what, setup, "torch", layout.bytes_moved, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    whole = model_for(device, quick)
    shapes, some = whole.shapes, f"add() on {whole}"
    return [
        case("bf16", f"{some}, bf16 to f32", Layout(shapes, BF16), Bar("fraction", 0.85, "cpu")),
        case("f16", f"{some}, f16 to f32", Layout(shapes, F16)),
        case("f32", f"{some}, f32 to f32", Layout(shapes, F32)),
        case(
            "bf16-zeroed",
            f"{some}, bf16 to f32, the gradients zeroed (add(): dropped)",
            Layout(shapes, BF16, zero_grads=True),
        ),
        case(
            "bf16-compensated",
            f"{some}, bf16 to f32, compensated (torch: plain)",
            Layout(shapes, BF16, compensated=True),
        ),
    ]
