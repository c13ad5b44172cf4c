"""Gradients added to f32 buffers: a GradAccumulator on a model, the op alone beside it."""

from __future__ import annotations

from functools import partial

import torch

from ._lists import Lists, list_case, on_next
from ._model import OP_ONLY, Shapes, model_for
from .harness import Bar, Case, Contender, Rotation, SameWork
from .instructions.row import FACTOR, Row

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SUM, COMPENSATED = {"90": 7.1, "86": 7.1, "75": 7.4}, {"90": 14, "86": 14, "75": 15.5}
BUDGETS = [
    Row("accumulate_kernel", "f32", 12, 8, 4, FACTOR, 1, {"90": 6.1, "86": 6.1, "75": 6.4}),
    Row("accumulate_kernel", "bf16", 10, 6, 4, FACTOR, 1, SUM),
    Row("accumulate_kernel", "f16", 10, 6, 4, FACTOR, 1, SUM, f16=True),
    Row("accumulate_kernel", "bf16, compensated", 18, 10, 8, FACTOR, 1, COMPENSATED),
]


def lists(shapes: Shapes, dtype: torch.dtype, compensated=False, zero_grads=False) -> Lists:
    dtypes = {"sums": F32, "compensations": F32 if compensated else None, "grads": dtype}
    passes = {"sums": 2, "compensations": 2, "grads": 2 if zero_grads else 1}
    return Lists(shapes, dtypes, passes, zeros={"compensations"})


def headroom_op(data: Rotation, zero_grads: bool = False) -> Contender:
    from headroom.functional import accumulate_

    add = partial(accumulate_, zero_grads=zero_grads)
    return on_next(data, lambda d: add(d.sums, d.grads, compensations=d.compensations))


def headroom_add(data: Rotation, compensated: bool = False) -> Contender:
    """`GradAccumulator.add()`, which takes each gradient from its parameter."""
    import headroom

    chosen, pairs = None, {}
    for d in data.sets:
        params = [torch.nn.Parameter(grad.clone()) for grad in d.grads]
        pairs[id(d)] = params, headroom.GradAccumulator(params, compensated=compensated)

    def give():
        nonlocal chosen
        chosen = data.next()
        for param, grad in zip(pairs[id(chosen)][0], chosen.grads):
            param.grad = grad

    return Contender(lambda: pairs[id(chosen)][1].add(), prepare=give)


def torch_foreach(data: Rotation, zero_grads: bool = False) -> Contender:
    """The plain sum, whether ours is compensated or not: torch has no other."""

    def call(d):
        torch._foreach_add_(d.sums, d.grads)
        if zero_grads:
            torch._foreach_zero_(d.grads)

    return on_next(data, call)


def torch_widened(data: Rotation) -> Contender:
    """Through an f32 copy of each gradient: on the CPU the faster way where dtypes differ."""
    return on_next(data, lambda d: [s.add_(g.float()) for s, g in zip(d.sums, d.grads)])


SAME_WORK = SameWork(
    [headroom_op, torch_foreach, torch_widened],
    [lists(((1000,),) * 3, dtype) for dtype in (F32, BF16, F16)],
    expected=lambda d: [s.double() + g.double() for s, g in zip(d.sums, d.grads)],
    left=lambda d: d.sums,
    tolerance=2 * torch.finfo(F32).eps,
)


def cases(device: torch.device, quick: bool) -> list[Case]:
    model = model_for(device, quick)

    def case(name, what, dtype, *bars, compensated=False, zero_grads=False):
        contenders = {
            "headroom": partial(headroom_add, compensated=compensated),
            OP_ONLY: partial(headroom_op, zero_grads=zero_grads),
            "torch": partial(torch_foreach, zero_grads=zero_grads),
        }
        if dtype != F32 and not zero_grads:
            contenders["torch, widened"] = torch_widened
        of = lists(model.shapes, dtype, compensated, zero_grads)
        return list_case(name, f"add() on {model}, {what}", of, contenders, *bars)

    return [
        case("bf16", "bf16 to f32", BF16, Bar("fraction", 0.85, "cpu")),
        case("f16", "f16 to f32", F16),
        case("f32", "f32 to f32", F32, Bar("ratio", 1.0, "cpu")),
        case("bf16-zeroed", "bf16 to f32, and zeroed (add(): dropped)", BF16, zero_grads=True),
        case("bf16-compensated", "bf16 to f32, compensated (torch: plain)", BF16, compensated=True),
    ]
