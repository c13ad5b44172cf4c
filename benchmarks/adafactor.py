"""Adafactor: the whole `step()` beside both originals, by the rule of each: on a language model,
on the tensors of a convolutional network, and on many small ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ._model import Shapes, filled_like, model_for, optimizer_step
from .harness import Bar, Case, Contender, Rotation, Unavailable, sets_needed
from .instructions.row import ADD, FACTOR, Row, evenly

F32, BF16 = torch.float32, torch.bfloat16
HF, FOR_LOOP, FOREACH = "transformers", "torch for-loop", "torch foreach"
# A residual network's: stem, blocks of 3 x 3 and 1 x 1, their norms, and the classifier.
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
    shapes: Shapes
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def bytes_held(self) -> int:
        return 2 * self.numel * self.dtype.itemsize

    @property
    def bytes_moved(self) -> int:
        """Reads the gradient three times and the parameter twice, and writes the parameter."""
        return 6 * self.numel * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Data:
        return Data(*(filled_like(self.shapes, self.dtype, device) for _ in range(2)))

    def rotation(self, device: torch.device) -> Rotation:
        return Rotation(
            [self.allocate(device) for _ in range(sets_needed(self.bytes_held, device))]
        )


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
    whole = model_for(device, quick)
    convolutions = Layout(CONVOLUTIONS[-2:] if quick else CONVOLUTIONS, F32)
    small = Layout(((64, 64), (64,)) * (10 if quick else 1000), F32)
    bars = [
        Bar("ratio", 8.0, "cpu", HF),
        Bar("ratio", 13.0, "cpu", FOR_LOOP),
        Bar("fraction", 0.8, "cuda"),
    ]
    step = f"step() on {whole}"
    return [
        case("f32", f"{step}, f32", Layout(whole.shapes, F32), *bars),
        case("bf16", f"{step}, bf16", Layout(whole.shapes, BF16)),
        case(
            "convolutions",
            f"step() on the {len(convolutions.shapes)} tensors of a network",
            convolutions,
        ),
        case("small", f"step() on {len(small.shapes):,} small tensors, f32", small, moved=False),
    ]


BUDGETS = [
    Row("adafactor_sums_kernel", "f32", 8, 8, 0, FACTOR, 3, evenly(9.4)),
    Row("adafactor_sums_kernel", "bf16", 4, 4, 0, FACTOR, 3, evenly(11)),
    Row("adafactor_norm_kernel", "f32", 4, 4, 0, ADD, 1, evenly(7.2)),
    Row("adafactor_norm_kernel", "bf16", 2, 2, 0, ADD, 1, evenly(8.2)),
    Row("adafactor_apply_kernel", "f32", 12, 8, 4, ADD, 1, evenly(10.9)),
    Row("adafactor_apply_kernel", "bf16", 6, 4, 2, ADD, 1, {"90": 11, "86": 11, "75": 18.3}),
    Row("adafactor_apply_kernel", "f16", 6, 4, 2, ADD, 1, {"90": 11, "86": 11, "75": 12}, f16=True),
]
