"""The first pass of Muon over the matrices of a model: moments, what is to be made orthogonal, and
the sums of its squares."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch

from . import adamw8bit
from ._lists import Lists, on_next
from ._matrices import BF16, F32, matrices_of, matrix_cases, tall_as_transposes
from ._model import Shapes
from .harness import Bar, Case, Contender, Rotation, SameWork, Share

ADAMW8BIT = "AdamW8bit's op"
# torch makes three passes or more and a list of new tensors. Turned updates go through a buffer, by
# columns, and reach a third of the rate of the memory.
BARS = {"f32": 3.0, "f32-turned": 1.5, "bf16": 3.0, "bf16-turned": 1.5}


def lists(shapes: Shapes, grad: torch.dtype) -> Lists:
    dtypes = {"grads": grad, "moments": F32, "updates": BF16}
    return Lists(shapes, dtypes, {"grads": 1, "moments": 2, "updates": 1})


def headroom(data: Rotation, turned: bool = False) -> Contender:
    """`turned`: matrices with more rows than columns are written as their transposes."""
    from headroom.functional import muon_momentum_

    squares = torch.empty(len(data.sets[0].grads), device=data.sets[0].grads[0].device)

    def call(d: SimpleNamespace) -> None:
        updates = d.updates
        if turned:
            updates = tall_as_transposes(updates, d.grads)
        muon_momentum_(d.grads, d.moments, updates, squares)

    return on_next(data, call)


def codes(shapes: Shapes) -> Lists:
    dtypes = {"grads": F32, "codes": torch.uint8, "updates": BF16}
    return Lists(shapes, dtypes, {"grads": 1, "codes": 2, "updates": 1}, zeros=("codes",))


def headroom_codes(data: Rotation) -> Contender:
    from headroom.functional import muon_momentum8bit_

    squares = torch.empty(len(data.sets[0].grads), device=data.sets[0].grads[0].device)
    scales = {
        id(d): [g.new_zeros(-(-g.numel() // adamw8bit.BLOCK)) for g in d.grads] for d in data.sets
    }
    return on_next(
        data, lambda d: muon_momentum8bit_(d.grads, d.codes, scales[id(d)], d.updates, squares)
    )


def by_torch(data: Rotation, turned: bool = False) -> Contender:
    """The lines of torch.optim.Muon, for all matrices at once where foreach has them. Matrices that
    are turned are so by a view, which costs nothing here."""

    def call(d: SimpleNamespace) -> None:
        grads = [g.float() for g in d.grads]
        torch._foreach_lerp_(d.moments, grads, 1 - 0.95)
        updates = torch._foreach_lerp(grads, d.moments, 0.95)
        torch._foreach_copy_(d.updates, updates)
        torch._foreach_norm(d.updates)

    return on_next(data, call)


def after(d: SimpleNamespace) -> list[torch.Tensor]:
    return [0.95 * m.double() + 0.05 * g.double() for m, g in zip(d.moments, d.grads)]


SAME_WORK = SameWork(
    [headroom, by_torch],
    [lists(((30, 50), (50, 30)), dtype) for dtype in (F32, BF16)],
    expected=after,
    left=lambda d: d.moments,
    tolerance=2 * torch.finfo(F32).eps,
)


def codes_case(device: torch.device, quick: bool) -> Case:
    """Moments in codes, beside torch's in float32, and the op of AdamW8bit, which moves more."""
    what, shapes = matrices_of(device, quick)
    own, wide, adamw = codes(shapes), lists(shapes, F32), adamw8bit.Layout(shapes, F32)

    def setup(device):
        return {
            "headroom": partial(headroom_codes, own.rotation(device)),
            "torch": partial(by_torch, wide.rotation(device)),
            ADAMW8BIT: partial(adamw8bit.headroom_op, adamw.rotation(device), adamw.bytes_moved),
        }

    # AdamW8bit moves twice the bytes, and finds codes of two moments. Codes, and not the memory,
    # take the time of both.
    bars = [Share("time", "headroom", ADAMW8BIT, 1.0, "cpu"), Bar("ratio", 1.0, "cpu")]
    return Case("8bit", f"{what}, f32 gradients, codes", setup, "torch", own.bytes_moved, bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    of_numbers = matrix_cases(lists, headroom, by_torch, device, quick, BARS, of=" gradients")
    return [*of_numbers, codes_case(device, quick)]
