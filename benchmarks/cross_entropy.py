"""Cross entropy of given logits: forward and backward through autograd, beside torch's own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import trained
from .harness import Bar, Case, Rotation, filled, sets_needed
from .instructions.call import Call, Step
from .instructions.row import Row, evenly

F32, BF16 = torch.float32, torch.bfloat16


class Rows(NamedTuple):
    logits: Tensor
    target: Tensor


def rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Rows:
    count, classes = shape
    logits = filled(count * classes, dtype, device).view(shape)
    target = (torch.arange(count, device=device) * 7919) % classes
    return Rows(logits.requires_grad_(), target)


def headroom_loss(d: Rows) -> Tensor:
    from headroom.functional import cross_entropy

    return cross_entropy(d.logits, d.target)


def torch_loss(d: Rows) -> Tensor:
    return F.cross_entropy(d.logits, d.target)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(dtype: torch.dtype, shape: tuple[int, int]) -> Case:
        used = (7, 96) if quick else shape
        numel = used[0] * used[1]

        def setup(device):
            sets = range(sets_needed(numel * dtype.itemsize, device))
            data = Rotation([rows(used, dtype, device) for _ in sets])
            return {
                "headroom": lambda: trained(data, headroom_loss, lambda d: d.logits),
                "torch": lambda: trained(data, torch_loss, lambda d: d.logits),
            }

        # Forward reads the logits; backward reads them and writes the gradient.
        work = 3 * numel * dtype.itemsize
        bars = [Bar("ratio", 1.5, "cpu")]
        name = "f32" if dtype == F32 else "bf16"
        what = f"cross_entropy forward and backward on {used[0]:,} x {used[1]:,}, {name}"
        return Case(f"{name}-{shape[1]}", what, setup, "torch", work, bars=bars)

    return [
        case(dtype, shape)
        for dtype in (F32, BF16)
        for shape in ((4096, 2048), (512, 8192), (4096, 32000))
    ]


SOFTMAX = {"90": 20, "86": 20}
EXP, LARGEST, FORWARD, BACKWARD, REDUCE = (
    ("FFMA",),
    ("FMNMX",),
    "cross_entropy_forward_kernel",
    "cross_entropy_backward_kernel",
    "cross_entropy_reduce_kernel",
)
BUDGETS = [
    Row(FORWARD, "f32", 4, 4, 0, LARGEST, 1, evenly(6.6)),
    Row(FORWARD, "bf16", 2, 2, 0, LARGEST, 1, evenly(7.5)),
    Row(FORWARD, "f16", 2, 2, 0, LARGEST, 1, evenly(7.5), f16=True),
    Row(BACKWARD, "f32", 8, 4, 4, EXP, 8, {"90": 21.1, "86": 21.1, "75": 22.2}),
    Row(BACKWARD, "bf16", 4, 2, 2, EXP, 8, SOFTMAX | {"75": 27.9}),
    Row(BACKWARD, "f16", 4, 2, 2, EXP, 8, SOFTMAX | {"75": 21.7}, f16=True),
    Row(BACKWARD, "f32 to bf16", 6, 4, 2, EXP, 8, {"90": 20.8, "86": 20.8, "75": 29.3}),
    # A row of the reduction: its target, loss and lse, which is read for a z-loss alone.
    Row(REDUCE, "rows", 16, 16, 0, ("DADD",), 4, {"90": 54, "86": 53, "75": 55}),
]


def call(name: str, kernel: str, count: int, classes: int, traffic: int, flying: int) -> Call:
    """A block a row; `flying` groups of eight of a thread are waited for together."""
    turns = classes / (256 * 8 * flying)
    step = Step(kernel, (("bf16", count * classes),), count, 256, turns, count * classes * traffic)
    return Call(f"{name}, {count:,} x {classes:,}, bf16", step.traffic, (step,))


def reduction(count: int) -> Call:
    """Parts of 2,048 rows, a block each, and one block for their sums."""
    parts, moved = -(-count // 2048), 12 * count  # 8 of a target, 4 of a loss
    rows = Step(REDUCE, (("rows", count),), parts, 512, 1, moved + 32 * parts)
    sums = Step("cross_entropy_parts_kernel", (), 1, 512, 1, 32 * parts)
    return Call(f"cross_entropy, mean of {count:,} rows", moved, (rows, sums))


CALLS = [
    call("cross_entropy", FORWARD, 8192, 128256, 2, 2),
    call("cross_entropy backward", BACKWARD, 8192, 128256, 4, 1),
    reduction(131072),
]
