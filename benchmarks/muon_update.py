"""The last pass of Muon over the matrices of a model: decay, and a step along their updates."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch

from ._lists import Lists, list_case, on_next
from ._model import Shapes, model_for
from .harness import Bar, Case, Contender, Rotation, SameWork

F32, BF16 = torch.float32, torch.bfloat16
LR, DECAY = 0.02, 0.1


def lists(shapes: Shapes, dtype: torch.dtype) -> Lists:
    return Lists(shapes, {"params": dtype, "updates": BF16}, {"params": 2, "updates": 1})


def headroom(data: Rotation, turned: bool = False) -> Contender:
    """`turned`: the updates of matrices with more rows than columns are transposes."""
    from headroom.functional import muon_update_

    def call(d: SimpleNamespace) -> None:
        updates = d.updates
        if turned:
            tall = [p.shape[0] > p.shape[1] for p in d.params]
            updates = [u.view(u.shape[::-1]).T if t else u for u, t in zip(updates, tall)]
        muon_update_(d.params, updates, lr=LR, weight_decay=DECAY)

    return on_next(data, call)


def by_torch(data: Rotation) -> Contender:
    """The last lines of torch.optim.Muon."""

    def call(d: SimpleNamespace) -> None:
        for param, update in zip(d.params, d.updates):
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
    model = model_for(device, quick)
    shapes = tuple(shape for shape in model.shapes if len(shape) == 2)
    bar = Bar("ratio", 1.5, "cpu")
    all_cases = []
    for dtype, word in ((F32, "f32"), (BF16, "bf16")):
        of = lists(shapes, dtype)
        contenders = {"headroom": headroom, "torch": by_torch}
        turned = {"headroom": partial(headroom, turned=True), "torch": by_torch}
        what = f"matrices of {model}, {word}"
        all_cases.append(list_case(word, what, of, contenders, bar))
        all_cases.append(list_case(f"{word}-turned", f"{what}, tall ones turned", of, turned, bar))
    return all_cases
