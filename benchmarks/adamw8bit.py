"""AdamW with 8-bit moments: the whole `step()` on a model and on many small tensors, the op alone
beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import adamw
from ._model import OP_ONLY, Shapes, filled_like, model_for, optimizer_step
from .harness import Bar, Case, Contender, Rotation, Unavailable, by_level, filled, sets_needed
from .instructions.row import SQRT, Row

BLOCK, SMALLEST = 256, 4096  # the optimizers' defaults: smaller tensors keep float32 moments
HYPER = {name: value for name, value in adamw.HYPER.items() if name != "amsgrad"}
F32, BF16 = torch.float32, torch.bfloat16
FUSED, TORCHAO, BNB = "torch fused f32", "torchao 8-bit", "bitsandbytes 8-bit"


class Data(NamedTuple):
    """One set of tensors that a step works on, in the order of the op's arguments."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_absmaxs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    exp_avg_sq_absmaxs: list[torch.Tensor]
    steps: list[torch.Tensor]


@dataclass
class Layout:
    shapes: Shapes
    param: torch.dtype

    @property
    def numels(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def blocks(self) -> int:
        return sum(-(-numel // BLOCK) for numel in self.numels)

    @property
    def bytes_held(self) -> int:
        return 2 * sum(self.numels) * (self.param.itemsize + 1) + 8 * self.blocks

    @property
    def bytes_moved(self) -> int:
        """Of the op. Reads parameter, gradient, codes and scales; writes all but the gradient."""
        return sum(self.numels) * (3 * self.param.itemsize + 4) + 16 * self.blocks

    @property
    def large(self) -> Layout:
        """The tensors that have 8-bit moments."""
        large = tuple(s for s, numel in zip(self.shapes, self.numels) if numel >= SMALLEST)
        return Layout(large, self.param)

    @property
    def bytes_of_step(self) -> int:
        small = tuple(s for s, numel in zip(self.shapes, self.numels) if numel < SMALLEST)
        return self.large.bytes_moved + adamw.Layout(small, self.param, F32).bytes_moved

    def allocate(self, device: torch.device) -> Data:
        def floats(dtype):
            return filled_like(self.shapes, dtype, device)

        def moment():
            codes = [
                torch.randint(256, shape, dtype=torch.uint8, device=device) for shape in self.shapes
            ]
            return codes, [filled(-(-numel // BLOCK), F32, device) for numel in self.numels]

        steps = [torch.ones((), device=device) for _ in self.shapes]
        return Data(floats(self.param), floats(self.param), *moment(), *moment(), steps)

    def rotation(self, device: torch.device) -> Rotation:
        return Rotation(
            [self.allocate(device) for _ in range(sets_needed(self.bytes_held, device))]
        )


def headroom_op(data: Rotation, work: int | None = None) -> Contender:
    """On the tensors that a step would give to the op."""
    import headroom  # noqa: F401  (registers the op)

    op = torch.ops.headroom.adamw8bit_.default
    lists = {}
    for d in data.sets:
        large = [k for k, param in enumerate(d.params) if param.numel() >= SMALLEST]
        chosen = large or range(len(d.params))
        lists[id(d)] = [[column[k] for k in chosen] for column in d]
    return Contender(
        lambda: op(*lists[id(data.next())], [], decoupled=True, block_size=BLOCK, **HYPER),
        work=work,
    )


def headroom_step(data: Rotation) -> Contender:
    import headroom

    return optimizer_step(data, headroom.optim.AdamW8bit)


def torchao_step(data: Rotation) -> Contender:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise Unavailable("not installed") from error
    return optimizer_step(data, AdamW8bit)


def bitsandbytes_step(data: Rotation) -> Contender:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise Unavailable("not installed") from error
    return optimizer_step(data, AdamW8bit)


def model(name: str, what: str, layout: Layout, *bars: Bar) -> Case:
    """`step()` with the defaults. Torch has no 8-bit moments: it gets its fastest, all float32."""
    fused = adamw.Layout(layout.shapes, F32, F32)

    def setup(device):
        data, wide = layout.rotation(device), fused.rotation(device)
        return {
            "headroom": lambda: headroom_step(data),
            OP_ONLY: lambda: headroom_op(data, layout.large.bytes_moved),
            FUSED: lambda: adamw.torch_step(wide, fused.bytes_moved, fused=True),
            TORCHAO: lambda: torchao_step(data),
            BNB: lambda: bitsandbytes_step(data),
        }

    return Case(name, what, setup, FUSED, layout.bytes_of_step, bars=bars)


def many_step(name: str, what: str, layout: Layout, *bars: Bar) -> Case:
    """Without torchao, whose moments are 8-bit only where blocks divide the size."""

    def setup(device):
        data = layout.rotation(device)
        return {
            "headroom": lambda: headroom_step(data),
            FUSED: lambda: adamw.torch_step(data, fused=True),
            BNB: lambda: bitsandbytes_step(data),
        }

    return Case(name, what, setup, FUSED, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    whole = model_for(device, quick)
    f32, bf16 = Layout(whole.shapes, F32), Layout(whole.shapes, BF16)
    many = Layout(((5_000,),) * (20 if quick else 10_000), F32)
    step = f"step() on {whole}, 8-bit moments"
    bnb_bar = Bar("ratio", by_level(22.0, 27.0), "cpu", BNB)
    f32_bars = [
        Bar("ratio", by_level(0.9, 1.2), "cpu"),
        Bar("ratio", 30.0, "cpu", TORCHAO),
        bnb_bar,
    ]
    bf16_bars = [
        Bar("ratio", by_level(1.0, 1.4), "cpu"),
        bnb_bar,
        Bar("fraction", 0.85, "cuda"),
        Bar("ratio", 2.0, "cuda", TORCHAO),
        Bar("ratio", 2.0, "cuda", BNB),
    ]
    what = f"step() on {len(many.shapes):,} f32 tensors of 5,000"
    return [
        model("f32", f"{step}, f32 parameters", f32, *f32_bars),
        model("bf16", f"{step}, bf16 parameters", bf16, *bf16_bars),
        many_step("step-10000x5000", what, many, bnb_bar),
    ]


ADAMW8BIT = {"90": 77, "86": 74.2, "75": 85}
REMAINDER16_8BIT = {"90": 91, "86": 87.6, "75": 91.3}
BUDGETS = [
    Row("adamw8bit_kernel", "f32", 16.06, 11, 6, SQRT, 1, {"90": 80, "86": 77.4, "75": 81}, 80),
    Row("adamw8bit_kernel", "bf16", 10.06, 7, 4, SQRT, 1, ADAMW8BIT, 75),
    Row("adamw8bit_kernel", "f16", 10.06, 7, 4, SQRT, 1, ADAMW8BIT | {"75": 79}, 75, f16=True),
    Row("adamw8bit_kernel", "remainder16", 14.06, 9, 6, SQRT, 1, REMAINDER16_8BIT, 95),
]
