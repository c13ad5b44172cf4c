"""Gradients added to f32 buffers: a GradAccumulator on a model, the op alone beside it."""

from __future__ import annotations

from functools import partial

import torch

from ._lists import Lists, list_case, on_next
from ._model import OP_ONLY, Shapes, model_for
from .harness import Bar, Case, Contender, Rotation, SameWork

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def lists(shapes: Shapes, dtype: torch.dtype, compensated=False, zero_grads=False) -> Lists:
    dtypes = {"sums": F32, "losts": F32 if compensated else None, "grads": dtype}
    passes = {"sums": 2, "losts": 2, "grads": 2 if zero_grads else 1}
    return Lists(shapes, dtypes, passes, zeros={"losts"})


def headroom_op(data: Rotation, zero_grads: bool = False) -> Contender:
    from headroom.functional import accumulate_

    def call(d):
        accumulate_(d.sums, d.grads, losts=d.losts, zero_grads=zero_grads)

    return on_next(data, call)


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

    zeroed, compensated = "the gradients zeroed (add(): dropped)", "compensated (torch: plain)"
    return [
        case("bf16", "bf16 to f32", BF16, Bar("fraction", 0.85, "cpu")),
        case("f16", "f16 to f32", F16),
        case("f32", "f32 to f32", F32, Bar("ratio", 1.0, "cpu")),
        case("bf16-zeroed", f"bf16 to f32, {zeroed}", BF16, zero_grads=True),
        case("bf16-compensated", f"bf16 to f32, {compensated}", BF16, compensated=True),
    ]
