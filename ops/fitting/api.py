"""``headroom.fit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.track import device_of
from ..planning.api import made
from ..planning.copies import tensors_in
from ..planning.errors import PlanError
from .apply import Applied
from .budgets import MARGINS, budget_of
from .candidates import setup_of
from .changes import changes_of
from .families import Families
from .fitted import Fitted
from .floors import does_not_fit
from .loop import Loop
from .replacing import made as optimizer_of
from .search import Search
from .setting import Setting
from .techniques import ALLOWABLE, Choice, Techniques

__all__ = ["fit"]


def fit(
    model: nn.Module,
    sample_batch: Any,
    *,
    budget: int | float | str | None = None,
    target: str | None = None,
    optimizer: Any = None,
    loss: Callable[..., Tensor] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    amp: torch.dtype | None = None,
    scaler: Any = None,
    max_grad_norm: float | None = None,
    allow: Sequence[str] = (),
    adapt: bool = False,
    margin: float | None = None,
    dry_run: bool = False,
) -> Fitted:
    """Finds the fastest way to train a model within a budget of memory, applies it, and returns
    what was done.

    It measures one step of each distinct kind of block, at each level of what the block keeps, and
    plans the rest. What changes no result of training is always used where it helps: levels, a
    fused optimizer, gradients that are released, the loss of a language model without its logits,
    and micro-batches. What changes the mathematics is used if it is allowed.

    Args:
        model: on the device that it trains on, in ``train()``. It is changed in place;
            :meth:`Fitted.undo` takes that back.
        sample_batch: a batch as training will see it: the largest, if they differ.
        budget: bytes, such as "6 GiB", that parameters, optimizer state, gradients, activations
            and, on CUDA, the allocator and the context may take together.
        target: "speed", instead of a budget: as fast as possible within the memory of the device,
            of which 20 % is left on the CPU, and 5 % on CUDA.
        optimizer: of the model's parameters, or a function that makes one from a list of them,
            such as a class. Adam and AdamW may be replaced, with all options of each group; then
            :attr:`Fitted.optimizer` is another one, and schedulers are to be made of that. None:
            :class:`torch.optim.AdamW`.
        loss, forward: how the loss is computed, as in :func:`headroom.plan`. It must be a mean
            over the samples.
        device: where the model is; needed if it is on several.
        amp: a dtype to run the forward pass and the loss in, under :class:`torch.autocast`.
        scaler: the :class:`torch.amp.GradScaler` of the loop.
        max_grad_norm: gradients are clipped to this norm before the step.
        allow: of "8bit" (moments of 8 bits), "bf16" (weights of 16 bits, with 16 more that the
            optimizer keeps) and "adafactor".
        adapt: after three steps, spend what was measured to be left on faster levels.
        margin: the share of the budget that is left free. None: 0.2 % on the CPU and 2 % on CUDA,
            by which plans have been wrong at the most.
        dry_run: only report; nothing is changed.

    Raises:
        DoesNotFit: no choice fits the budget. Says which floor was hit, and what would help.
        PlanError: the step cannot be planned; see :func:`headroom.plan`.
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    allowed = _checked(model, sample_batch, loss, forward, allow, margin)
    where = device_of(model, device)
    batch = _on(sample_batch, where)
    given = optimizer_of(torch.optim.AdamW if optimizer is None else optimizer, model)
    scales = scaler is not None and scaler.is_enabled()
    setting = Setting(model, batch, loss, forward, where, amp, scales)
    held = sum(x.nbytes for x in {*model.parameters(), *model.buffers()})
    limit = budget_of(budget, target, where, held)
    within = int(limit * (1 - (MARGINS[where.type] if margin is None else margin)))

    techniques = Techniques.of(setting, given, allowed, max_grad_norm)
    families = Families(setting, techniques, max_grad_norm)
    search = Search(families)
    found = search.best(within)
    if found is None:
        raise does_not_fit(search, limit, within, given, allowed)
    before = _before(setting, given, max_grad_norm)
    changes, before_seconds = changes_of(search, found, before)
    chosen = techniques.optimizer_of(found.choice)
    applied = None
    if not dry_run:
        applied = Applied(model, families.names, chosen, found.choice)
    return Fitted(
        model,
        chosen,
        found.choice,
        limit,
        found.plan,
        found.plan.total_bytes,
        found.seconds,
        before,
        before_seconds,
        changes,
        search.frontier(),
        families.names,
        [*techniques.notes, *families.notes],
        reachable=search.frontier(found.choice),
        within=within,
        planner=search.plan_of if adapt else None,
        _loop=Loop(setting.but(batch=None), chosen, scaler if scales else None, max_grad_norm),
        _applied=applied,
        _adapts=adapt,
        _counts=techniques.micro_batches,
    )


def _before(setting: Setting, given: Any, max_grad_norm: float | None) -> int | None:
    """The planned peak of the model as it was given, or None if that cannot be planned."""
    try:
        return made(setup_of(setting, Choice(), (), given, max_grad_norm)).total_bytes
    except PlanError:
        return None


def _on(batch: Any, device: torch.device) -> Any:
    """Returns the batch, whose tensors must be where the model is.

    Raises:
        ValueError: a tensor is elsewhere.
    """
    for x in tensors_in(batch):
        if x.device != device:
            raise ValueError(
                f"sample_batch has a tensor on {x.device}, but the model is on {device}"
            )
    return batch


def _checked(
    model: Any, batch: Any, loss: Any, forward: Any, allow: Any, margin: float | None
) -> tuple[str, ...]:
    """Returns what is allowed, after all arguments that stand for themselves were looked at."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, wanted a torch.nn.Module")
    if not model.training:
        raise ValueError("the model is in eval(): call model.train() before fit()")
    if batch is None:
        raise ValueError("sample_batch is None, wanted a batch such as the loop will see")
    if loss is not None and forward is not None:
        raise ValueError("loss and forward were both given: forward computes the loss itself")
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    if wrong := [name for name in allowed if name not in ALLOWABLE]:
        raise ValueError(f"allow has {wrong[0]!r}, wanted some of {', '.join(ALLOWABLE)}")
    if margin is not None and not 0 <= margin < 1:
        raise ValueError(f"margin is {margin}, wanted a share of the budget from 0 to below 1")
    return allowed
