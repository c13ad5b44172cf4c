"""Measures how long the step of an optimizer takes."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...memory.collecting import no_collections
from ...step.randomness import generators_kept
from .clock import Stopwatch

__all__ = ["optimizer_seconds"]

ELEMENTS = 4 << 20


def optimizer_seconds(
    optimizer: Any,
    params: Iterable[Tensor],
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    elements: int = ELEMENTS,
    repeats: int = 3,
) -> float:
    """Returns the seconds of a step, timed on copies of some parameters and scaled by bytes.

    Nothing that is given is changed, and random numbers go on as if nothing had been run.

    Args:
        optimizer: one of :mod:`torch.optim`'s kind, whose class and options count; or a function
            that makes one of a list of parameters; or None.
        params: the parameters that it steps; those that require no gradient are left out.
        device: that they are on.
        dtype: that they will be cast to before the optimizer steps them; None: they stay as they
            are.
        elements: no more than so many are copied, from the first on.
        repeats: the median of so many steps counts, after two that make states and warm up.
    """
    own = [param for param in params if param.requires_grad]
    if optimizer is None or not own:
        return 0.0
    with generators_kept(device), no_collections():
        copies = _copies(own, elements, dtype)
        made = _made(optimizer, own, copies)
        watch = Stopwatch(device)
        for number in range(2 + repeats):
            if number >= 2:
                watch.lap()
            made.step()
        watch.lap()
        seconds = statistics.median(watch.seconds())
    return seconds * _bytes(own, dtype) / _bytes(copies, dtype)


def _bytes(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> int:
    return sum(x.numel() * (dtype or x.dtype).itemsize for x in tensors)


def _copies(params: Sequence[Tensor], elements: int, dtype: torch.dtype | None) -> list[Tensor]:
    """Returns copies with gradients of the first parameters, the last of them cut."""
    made: list[Tensor] = []
    left = elements
    for param in params:
        if param.numel() == 0:
            continue
        if made and left <= 0:
            break
        cut = param.detach()
        if cut.dim() and cut.numel() > left:
            rows = max(1, left * cut.shape[0] // cut.numel())
            cut = cut[:rows]
        left -= cut.numel()
        copy = nn.Parameter(cut.to(dtype or cut.dtype, copy=True))
        copy.grad = torch.randn_like(copy).mul_(1e-3)
        made.append(copy)
    return made


def _made(optimizer: Any, params: Sequence[Tensor], copies: list[Tensor]) -> Any:
    while not hasattr(optimizer, "param_groups") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "param_groups"):
        return optimizer(copies)
    return _like(optimizer)(_groups(optimizer, params, copies))


def _like(optimizer: Any) -> Callable[[Any], Any]:
    """Returns what makes an optimizer of the class and with the defaults of another."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    if "semantics" in known:  # of Adafactor, which decides what the other options are
        defaults["semantics"] = optimizer.semantics
    return lambda groups: kind(groups, **defaults)


def _groups(
    optimizer: Any, params: Sequence[Tensor], copies: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer with the copies in them. Those of parameters that were
    not copied are left out."""
    copied = {id(param): copy for param, copy in zip(params, copies)}
    groups = []
    for group in optimizer.param_groups:
        found = [copied[id(param)] for param in group["params"] if id(param) in copied]
        if found:
            groups.append({**group, "params": found})
    return groups
