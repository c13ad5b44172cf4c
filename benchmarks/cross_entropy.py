"""Cross entropy of given logits: forward and backward through autograd, beside torch's own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import trained
from .harness import Bar, Case, Rotation, filled, sets_needed
from .instructions.row import Row

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
EXP, FORWARD, BACKWARD = ("FFMA",), "cross_entropy_forward_kernel", "cross_entropy_backward_kernel"
BUDGETS = [
    Row(FORWARD, "f32", 4, 4, 0, EXP, 8, {"90": 19, "86": 19, "75": 20.1}),
    Row(FORWARD, "bf16", 2, 2, 0, EXP, 8, SOFTMAX | {"75": 21.1}),
    Row(FORWARD, "f16", 2, 2, 0, EXP, 8, SOFTMAX | {"75": 21.1}, f16=True),
    Row(BACKWARD, "f32", 8, 4, 4, EXP, 8, {"90": 20.5, "86": 20.5, "75": 21.7}),
    Row(BACKWARD, "bf16", 4, 2, 2, EXP, 8, SOFTMAX | {"75": 27.9}),
    Row(BACKWARD, "f16", 4, 2, 2, EXP, 8, SOFTMAX | {"75": 21.7}, f16=True),
    Row(BACKWARD, "f32 to bf16", 6, 4, 2, EXP, 8, SOFTMAX | {"75": 27.9}),
]
