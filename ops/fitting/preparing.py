"""What is looked at before anything is chosen: the arguments, the model as it was given, and what
can be changed about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.track import device_of
from ..planning.api import made
from ..planning.copies import tensors_in
from ..planning.errors import PlanError
from .candidates import setup_of
from .families import Families
from .replacing import made as optimizer_of
from .search import Search
from .setting import Setting
from .techniques import ALLOWABLE, Choice, Techniques

__all__ = ["peak_as_given", "search_of"]


def search_of(
    model: nn.Module,
    sample_batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[..., Tensor] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    amp: torch.dtype | None = None,
    scales: bool = False,
    max_grad_norm: float | None = None,
    allow: Collection[str] | str = (),
    only: Mapping[str, Collection[Any]] | None = None,
) -> Search:
    """Returns the search for a model, which has measured nothing yet.

    Args:
        scales: whether losses are scaled. All others are those of :func:`headroom.fit`.

    Raises:
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    allowed = _checked(model, sample_batch, loss, forward, allow)
    where = device_of(model, device)
    for x in tensors_in(sample_batch):
        if x.device != where:
            raise ValueError(
                f"sample_batch has a tensor on {x.device}, but the model is on {where}"
            )
    given = optimizer_of(torch.optim.AdamW if optimizer is None else optimizer, model)
    setting = Setting(model, sample_batch, loss, forward, where, amp, scales)
    techniques = Techniques.of(setting, given, allowed, max_grad_norm, only)
    return Search(Families(setting, techniques, max_grad_norm))


def peak_as_given(search: Search) -> int | None:
    """Returns the planned bytes of the model as it was given, or None if it cannot be planned."""
    families = search.families
    techniques = families.techniques
    given, parts = techniques.given, techniques.micro_batches[0]
    try:
        choice = Choice((), parts)
        setup = setup_of(families.setting, choice, (), given, families.max_grad_norm)
        return made(setup).total_bytes
    except PlanError:
        return None


def _checked(
    model: Any, batch: Any, loss: Any, forward: Any, allow: Collection[str] | str
) -> tuple[str, ...]:
    """Returns what is allowed, after all arguments that stand for themselves were looked at."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, wanted a torch.nn.Module")
    if not model.training:
        raise ValueError("the model is in eval(): call model.train() before this")
    if batch is None:
        raise ValueError("sample_batch is None, wanted a batch such as the loop will see")
    if loss is not None and forward is not None:
        raise ValueError("loss and forward were both given: forward computes the loss itself")
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    if wrong := [name for name in allowed if name not in ALLOWABLE]:
        raise ValueError(f"allow has {wrong[0]!r}, wanted some of {', '.join(ALLOWABLE)}")
    return allowed
