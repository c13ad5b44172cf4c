"""The first pass of Muon over the matrices of a model: moments, what is to be made orthogonal, and
the sums of its squares."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ._lists import Lists, on_next
from ._matrices import BF16, F32, matrix_cases, tall_as_transposes
from ._model import Shapes
from .harness import Case, Contender, Rotation, SameWork


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


def by_torch(data: Rotation) -> Contender:
    """The lines of torch.optim.Muon, for all matrices at once where foreach has them."""

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


def cases(device: torch.device, quick: bool) -> list[Case]:
    return matrix_cases(lists, headroom, by_torch, device, quick, of=" gradients")
