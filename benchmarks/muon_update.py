"""The last pass of Muon over the matrices of a model: decay, and a step along their updates."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ._lists import Lists, on_next
from ._matrices import BF16, F32, matrix_cases, tall_as_transposes
from ._model import Shapes
from .harness import Case, Contender, Rotation, SameWork

LR, DECAY = 0.02, 0.1
# torch makes two passes where one does, and in bfloat16 they are half as long.
BARS = {"f32": 1.5, "f32-turned": 1.0, "bf16": 1.2, "bf16-turned": 1.0}


def lists(shapes: Shapes, dtype: torch.dtype) -> Lists:
    return Lists(shapes, {"params": dtype, "updates": BF16}, {"params": 2, "updates": 1})


def headroom(data: Rotation, turned: bool = False) -> Contender:
    """`turned`: the updates of matrices with more rows than columns are transposes."""
    from headroom.functional import muon_update_

    def call(d: SimpleNamespace) -> None:
        updates = d.updates
        if turned:
            updates = tall_as_transposes(updates, d.params)
        muon_update_(d.params, updates, lr=LR, weight_decay=DECAY)

    return on_next(data, call)


def by_torch(data: Rotation, turned: bool = False) -> Contender:
    """The last lines of torch.optim.Muon, whose updates of tall matrices are transposes, too."""

    def call(d: SimpleNamespace) -> None:
        updates = tall_as_transposes(d.updates, d.params) if turned else d.updates
        for param, update in zip(d.params, updates):
            param.mul_(1 - LR * DECAY)
            param.add_(update, alpha=-LR)

    return on_next(data, call)


SAME_WORK = SameWork(
    [headroom, by_torch],
    [lists(((30, 50), (50, 30)), F32)],
    expected=lambda d: [
        p.double() * (1 - LR * DECAY) - LR * u.double() for p, u in zip(d.params, d.updates)
    ],
    left=lambda d: d.params,
    tolerance=2 * torch.finfo(F32).eps,
)


def cases(device: torch.device, quick: bool) -> list[Case]:
    return matrix_cases(lists, headroom, by_torch, device, quick, BARS)
