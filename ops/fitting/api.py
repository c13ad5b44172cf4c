"""``headroom.fit``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .agree import RankError, best_of_ranks, together
from .apply import Applied
from .blocks import Blocks
from .budgets import budget_of, within
from .changes import changes_of
from .fitted import Fitted
from .floors import does_not_fit
from .loop import Loop
from .preparing import peak_as_given, search_of
from .search import Found

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
    only: Mapping[str, Collection[Any]] | None = None,
    group: Any = None,
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
        only: for fields of a :class:`Choice`, the values that the loop can take, such as
            ``{"micro_batches": (2, 4)}`` of a loop that makes 2 anyway. Other fields may have any.
        group: the ranks that train together. All of them call this, and all take one choice: see
            :func:`headroom.fitting.agree.agreed`. None: all ranks, where there are several.

    Raises:
        DoesNotFit: no choice fits the budget. Says which floor was hit, and what would help.
        PlanError: the step cannot be planned; see :func:`headroom.plan`.
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    with together(group):
        if margin is not None and not 0 <= margin < 1:
            raise ValueError(f"margin is {margin}, wanted a share of the budget from 0 to below 1")
        allowed = (allow,) if isinstance(allow, str) else tuple(allow)
        scales = scaler is not None and scaler.is_enabled()
        search = search_of(
            model,
            sample_batch,
            optimizer=optimizer,
            loss=loss,
            forward=forward,
            device=device,
            amp=amp,
            scales=scales,
            max_grad_norm=max_grad_norm,
            allow=allowed,
            only=only,
        )
        families = search.families
        techniques, setting = families.techniques, families.setting
        where, given = setting.device, techniques.given
        held = sum(x.nbytes for x in {*model.parameters(), *model.buffers()})
        limit = budget_of(budget, target, where, held)
        room = within(limit, margin, where, len(Blocks(model).names))

    def propose(room: int) -> Found:
        found = search.best(room)
        if found is None:
            raise does_not_fit(search, limit, room, given, allowed)
        return found

    found = best_of_ranks(search, propose, room, group)
    applied = None
    try:
        with together(group):
            before = peak_as_given(search)
            changes, before_seconds = changes_of(search, found, before, given)
            chosen = techniques.optimizer_of(found.choice)
            if not dry_run:
                applied = Applied(model, families.names, chosen, found.choice)
    except RankError:
        if applied is not None:
            applied.undo()
        raise
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
        within=room,
        planner=search.plan_of if adapt else None,
        _loop=Loop(setting.but(batch=None), chosen, scaler if scales else None, max_grad_norm),
        _applied=applied,
        _adapts=adapt,
        _counts=techniques.micro_batches,
    )
