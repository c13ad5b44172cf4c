"""Norms of rows: forward and backward through autograd, beside torch's own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import trained
from .harness import Bar, Case, Rotation, filled, sets_needed
from .instructions.call import Call, Step
from .instructions.row import FACTOR, Row, evenly

F32, BF16 = torch.float32, torch.bfloat16


class Rows(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor


def rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Rows:
    count, cols = shape
    x, dy = (filled(count * cols, dtype, device).view(shape) for _ in range(2))
    weight, bias = (filled(cols, dtype, device).requires_grad_() for _ in range(2))
    return Rows(x.requires_grad_(), weight, bias, dy)


def headroom_rms(d: Rows) -> Tensor:
    from headroom.functional import rms_norm

    return rms_norm(d.x, d.weight, 1e-6, casting="once")


def headroom_layer(d: Rows) -> Tensor:
    from headroom.functional import layer_norm

    return layer_norm(d.x, d.weight, d.bias)


def torch_rms(d: Rows) -> Tensor:
    return F.rms_norm(d.x, d.weight.shape, d.weight, 1e-6)


def torch_layer(d: Rows) -> Tensor:
    return F.layer_norm(d.x, d.weight.shape, d.weight, d.bias)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> Case:
        ours, theirs, inputs = {
            "rms": (headroom_rms, torch_rms, 2),
            "layer": (headroom_layer, torch_layer, 3),
        }[kind]
        used = (7, 96) if quick else shape
        numel = used[0] * used[1]

        def setup(device):
            held = 2 * numel * dtype.itemsize
            sets = range(sets_needed(held, device))
            data = Rotation([rows(used, dtype, device) for _ in sets])
            return {
                "headroom": lambda: trained(data, ours, lambda d: d[:inputs], lambda d: d.dy),
                "torch": lambda: trained(data, theirs, lambda d: d[:inputs], lambda d: d.dy),
            }

        # Forward reads x and writes y; backward reads x and dy and writes dx.
        work = 5 * numel * dtype.itemsize
        bars = [Bar("ratio", 2.0, "cpu")]
        name = "f32" if dtype == F32 else "bf16"
        what = f"{kind}_norm forward and backward on {used[0]:,} x {used[1]:,}, {name}"
        return Case(f"{kind}-{name}-{shape[1]}", what, setup, "torch", work, bars=bars)

    return [
        case(kind, dtype, shape)
        for kind in ("rms", "layer")
        for dtype in (F32, BF16)
        for shape in ((4096, 2048), (512, 8192))
    ]


FORWARD, BACKWARD = "norm_forward_kernel", "norm_backward_kernel"
NORM, NORM_BACK = {"90": 17, "86": 16.5}, {"90": 24.8, "86": 25}
BUDGETS = [
    # All that a thread does with a row that stays in registers, for RMS norms of plain weights.
    Row(FORWARD, "f32", 8, 8, 4, FACTOR, 3, {"90": 16.2, "86": 16.2, "75": 21.4}, whole=16),
    Row(FORWARD, "bf16", 4, 4, 2, FACTOR, 3, NORM | {"75": 22.8}, whole=32),
    Row(FORWARD, "bf16, short", 4, 4, 2, FACTOR, 3, {"90": 21.5, "86": 20.6, "75": 27.1}, whole=16),
    Row(FORWARD, "f16", 4, 4, 2, FACTOR, 3, NORM | {"75": 18}, f16=True, whole=32),
    Row(BACKWARD, "f32", 12, 8, 4, FACTOR, 9, {"90": 35.2, "86": 35.7, "75": 50.1}, whole=8),
    Row(BACKWARD, "bf16", 6, 4, 2, FACTOR, 9, NORM_BACK | {"75": 31.7}, whole=16),
    Row(BACKWARD, "f16", 6, 4, 2, FACTOR, 9, NORM_BACK | {"75": 25.7}, f16=True, whole=16),
    # Of longer rows, the pass that finds the means.
    Row("norm_backward_long_kernel", "f32, means", 8, 12, 0, FACTOR, 3, evenly(19.4)),
    Row("norm_backward_long_kernel", "bf16, means", 4, 6, 0, FACTOR, 3, evenly(12.4)),
]


def forward_call(what: str, count: int, cols: int, width: int, mix: str = "bf16") -> Call:
    """Teams of `width` threads; they wait for x and for the weights, which come from the cache."""
    moved = count * cols * (8 if mix == "f32" else 4)
    block = max(width, 128)
    step = Step(FORWARD, ((mix, count * cols),), count * width // block, block, 1.5, moved)
    return Call(f"rms_norm, {what}, {mix}", moved, (step,))


def backward_call(count: int, cols: int, width: int, mix: str = "bf16") -> Call:
    """Groups of 16 rows, whose sums of dweight a second launch adds."""
    moved, groups = count * cols * (12 if mix == "f32" else 6), count // 16
    sums = 4 * groups * cols
    rows = Step(BACKWARD, ((mix, count * cols),), groups, width, 17, moved + sums)
    add = Step("norm_add_groups_kernel", (), cols // 32, 1024, 1, sums)
    return Call(f"rms_norm backward, {count:,} x {cols:,}, {mix}", moved, (rows, add))


CALLS = [
    forward_call("4,096 x 4,096", 4096, 4096, 128),
    forward_call("4,096 x 4,096", 4096, 4096, 256, "f32"),
    forward_call("4,096 tokens, 40 heads of 128", 4096 * 40, 128, 8, "bf16, short"),
    backward_call(4096, 4096, 256),
    backward_call(4096, 4096, 512, "f32"),
]
