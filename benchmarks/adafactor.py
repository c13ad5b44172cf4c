"""Times Adafactor's `step()` by both rules beside their originals: on one large matrix, on the
tensors of a convolutional network, and on many small tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .harness import Bar, Case, Contender, Rotation, Unavailable, filled, sets_needed, sized

F32, BF16 = torch.float32, torch.bfloat16
HF, FOR_LOOP, FOREACH = "transformers", "torch for-loop", "torch foreach"
# Of a residual network: stem, blocks of 3 x 3 and 1 x 1, their norms, and the classifier.
CONVOLUTIONS = (
    (64, 3, 7, 7),
    *((256, 256, 3, 3),) * 6,
    *((1024, 256, 1, 1),) * 6,
    *((256,),) * 24,
    (1000, 1024),
)


class Data(NamedTuple):
    params: list[torch.Tensor]
    grads: list[torch.Tensor]


@dataclass
class Layout:
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def bytes_held(self) -> int:
        return 2 * self.numel * self.dtype.itemsize

    @property
    def bytes_moved(self) -> int:
        """Reads the gradient three times and the parameter twice, and writes the parameter."""
        return 6 * self.numel * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Data:
        def tensors():
            return [
                filled(torch.Size(shape).numel(), self.dtype, device).view(shape)
                for shape in self.shapes
            ]

        return Data(tensors(), tensors())

    def rotation(self, device: torch.device) -> Rotation:
        return Rotation(
            [self.allocate(device) for _ in range(sets_needed(self.bytes_held, device))]
        )


def optimizer_step(data: Rotation, make: Callable[..., torch.optim.Optimizer]) -> Contender:
    """Times `step()` of an optimizer that has its own states for each set of the rotation."""
    optimizers = {}
    for d in data.sets:
        params = [torch.nn.Parameter(param) for param in d.params]
        for param, grad in zip(params, d.grads):
            param.grad = grad
        optimizers[id(d)] = make(params)
    return Contender(lambda: optimizers[id(data.next())].step())


def headroom_step(data: Rotation, semantics: str) -> Contender:
    import headroom

    return optimizer_step(data, lambda ps: headroom.optim.Adafactor(ps, semantics=semantics))


def hf_step(data: Rotation) -> Contender:
    try:
        from transformers.optimization import Adafactor
    except ImportError as error:
        raise Unavailable("not installed") from error
    return optimizer_step(data, Adafactor)


def torch_step(data: Rotation, foreach: bool) -> Contender:
    return optimizer_step(data, lambda ps: torch.optim.Adafactor(ps, foreach=foreach))


def case(name: str, what: str, layout: Layout, *bars: Bar, moved: bool = True) -> Case:
    def setup(device):
        data = layout.rotation(device)
        return {
            "headroom": lambda: headroom_step(data, "hf"),
            "headroom, torch's rule": lambda: headroom_step(data, "torch"),
            HF: lambda: hf_step(data),
            FOR_LOOP: lambda: torch_step(data, False),
            FOREACH: lambda: torch_step(data, True),
        }

    work = layout.bytes_moved if moved else None
    return Case(name, what, setup, FOR_LOOP, work, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    n = 1 << 14 if quick else sized(1 << (28 if device.type == "cuda" else 25), 4 * 16, device)
    cols = min(8192, n)
    large = ((n // cols, cols),)
    convolutions = Layout(CONVOLUTIONS[-2:] if quick else CONVOLUTIONS, F32)
    small = Layout(((64, 64), (64,)) * (10 if quick else 1000), F32)
    bars = [
        Bar("ratio", 8.0, "cpu", HF),
        Bar("ratio", 13.0, "cpu", FOR_LOOP),
        Bar("fraction", 0.8, "cuda"),
    ]
    one = f"one tensor of {n // cols:,} x {cols:,}"
    return [
        case("f32", f"{one}, f32", Layout(large, F32), *bars),
        case("bf16", f"{one}, bf16", Layout(large, BF16)),
        case("convolutions", f"{len(convolutions.shapes)} tensors of a network", convolutions),
        case("small", f"{len(small.shapes):,} small tensors, f32", small, moved=False),
    ]
