"""Cases of the two passes of Muon, over the matrices of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._lists import Lists, list_case
from ._model import Shapes, model_for
from .harness import Bar, Case

F32, BF16 = torch.float32, torch.bfloat16


def tall_as_transposes(updates: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Returns the updates, those of matrices with more rows than columns as transposes of others of
    as many elements."""
    tall = [x.shape[0] > x.shape[1] for x in like]
    return [u.view(u.shape[::-1]).T if t else u for u, t in zip(updates, tall)]


def matrices_of(device: torch.device, quick: bool) -> tuple[str, Shapes]:
    """Returns the matrices of a model, and what they are."""
    model = model_for(device, quick)
    return f"matrices of {model}", tuple(shape for shape in model.shapes if len(shape) == 2)


def matrix_cases(
    lists: Callable[[Shapes, torch.dtype], Lists],
    headroom: Callable[..., Any],
    by_torch: Callable[..., Any],
    device: torch.device,
    quick: bool,
    bars: dict[str, float],
    of: str = "",
) -> list[Case]:
    """Returns a case for each dtype, and one with tall matrices turned. `bars` has the ratio that
    each aims at, by its name."""
    matrices, shapes = matrices_of(device, quick)
    cases = []
    for dtype, word in ((F32, "f32"), (BF16, "bf16")):
        data = lists(shapes, dtype)
        makes = {"headroom": headroom, "torch": by_torch}
        turned = {name: partial(make, turned=True) for name, make in makes.items()}
        what = f"{matrices}, {word}{of}"
        for name, text, chosen in (
            (word, what, makes),
            (f"{word}-turned", f"{what}, tall ones turned", turned),
        ):
            cases.append(list_case(name, text, data, chosen, Bar("ratio", bars[name], "cpu")))
    return cases
