"""Measures how long the step of an optimizer takes."""

from __future__ import annotations

import inspect
import statistics
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.randomness import generators_kept
from ...memory.collecting import no_collections
from ...optim.muon.matrices import newton_schulz_work
from ...param_states.paging.handle import begin
from ...step.clock import Stopwatch

ELEMENTS = 4 << 20
MATRICES = {"cpu": 1 << 18, "cuda": 4 << 20}
"""Elements of matrices that Muon makes orthogonal: more would take seconds on a CPU."""


def optimizer_seconds(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    offload: bool = False,
    elements: int = ELEMENTS,
    repeats: int = 3,
) -> float:
    """Returns the seconds of a step, timed on copies of some parameters and scaled by bytes; those
    of Muon's matrices are timed apart and scaled by operations.

    Nothing that is given is changed, and random numbers go on as if nothing had been run.

    Args:
        optimizer: whose class and options count.
        device: that the step runs on.
        dtype: that they will be cast to before the optimizer steps them; None: they stay as they
            are.
        offload: whether all of the state lies on the host.
        elements: no more than so many are copied, from the first on; of matrices of Muon fewer.
        repeats: the median of so many steps counts, after two that make states and warm up.
    """
    parts: tuple[list[Any], list[Any]] = [], []
    for group in optimizer.param_groups:
        parts[newton_schulz_work([group])[0] > 0].append(group)
    seconds = 0.0
    with generators_kept(device), no_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no loop between these steps
        for is_muon, part in enumerate(parts):
            most = min(elements, MATRICES[device.type]) if is_muon else elements
            copies = _copied(part, most, dtype, device)
            if not copies:
                continue
            made: Any = _like(optimizer, copies)
            if offload:
                begin(made, "state", None)
            watch = Stopwatch(device)
            for number in range(2 + repeats):
                if number >= 2:
                    watch.lap()
                made.step()
            watch.lap()
            seconds += (
                statistics.median(watch.seconds()) * _work(part, dtype) / _work(copies, dtype)
            )
    return seconds


def _work(groups: list[dict[str, Any]], dtype: torch.dtype | None) -> int:
    """Returns the operations of Newton-Schulz, or the bytes of parameters where there are none."""
    params = (p for group in groups for p in group["params"] if p.requires_grad)
    return newton_schulz_work(groups)[0] or _bytes(params, dtype)


def _bytes(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> int:
    return sum(x.numel() * (dtype or x.dtype).itemsize for x in tensors)


def _copied(
    groups: Iterable[dict[str, Any]], left: int, dtype: torch.dtype | None, device: torch.device
) -> list[dict[str, Any]]:
    """Returns groups of copies of the first parameters with gradients, of up to ``left`` elements,
    for which the last of them is cut. Packed matrices of its group are whole then."""
    made = []
    for group in groups:
        copies, cuts = [], {}
        for param in group["params"]:
            if left <= 0 or not param.requires_grad or param.numel() == 0:
                continue
            cut = param.detach()
            if cut.dim() and cut.numel() > left:
                cut = cut[: max(1, left * cut.shape[0] // cut.numel())]
                cuts = {"split": None} if "split" in group else {}
            left -= cut.numel()
            copy = nn.Parameter(cut.to(device, dtype or cut.dtype, copy=True))
            copy.grad = torch.randn_like(copy).mul_(1e-3)
            copies.append(copy)
        if copies:
            made.append({**group, "params": copies, **cuts})
    return made


def _like(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns an optimizer of the class and with the defaults of another."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    if "semantics" in known:  # of Adafactor, which decides what the other options are
        defaults["semantics"] = optimizer.semantics  # type: ignore[attr-defined]
    return kind(groups, **defaults)
