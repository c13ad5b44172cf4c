"""``headroom.fit``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .agree import best_of_ranks, together
from .apply import Applied
from .arguments import check_margin, check_only
from .blocks import Blocks
from .budgets import budget_of, within
from .changes import report_of
from .choice import Choice
from .fitted import Fitted
from .floors import does_not_fit
from .ladder import Ladder
from .loop import Loop
from .lower_bounds import below_every_choice
from .micro_batches import bytes_of
from .parting import Parting
from .preparing import Asked, search_of
from .releasing import bucket_of
from .search import Found
from .stored import Stored

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
    ladder: Ladder | None = None,
    dry_run: bool = False,
    only: Mapping[str, Collection[Any]] | None = None,
    choice: Choice | Mapping[str, Any] | None = None,
    group: Any = None,
    _parts_add_up: bool = False,  # of loops of other libraries, which weigh losses themselves
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
        loss, forward: how the loss is computed, as in :func:`headroom.plan`: a mean over samples,
            or over labels that are not -100, for which micro-batches are weighed. Give a batch with
            such labels if there will be any: it shows which.
        device: where the model is; needed if it is on several.
        amp: a dtype to run the forward pass and the loss in, under :class:`torch.autocast`.
        scaler: the :class:`torch.amp.GradScaler` of the loop.
        max_grad_norm: gradients are clipped to this norm before the step.
        allow: of "8bit" (moments of 8 bits), "bf16" (weights of 16 bits, with 16 more that the
            optimizer keeps; weights that it lacks, such as the frozen ones beside a LoRA, are
            rounded for good) and "adafactor".
        adapt: after three steps, of batches as large as the sample, spend what was measured to be
            left on faster levels.
        margin: the share of the budget that is left free. None: 0.2 % on the CPU and 2 % on CUDA,
            by which plans have been wrong at the most.
        ladder: what :func:`headroom.ladder` returned for the same arguments: what it has measured
            and planned is used, and only the rest is looked at. The optimizer may be another one of
            the same class with the same parameters and options; it is that of this call which
            trains, or is replaced.
        dry_run: only report; nothing is changed.
        only: for fields of a :class:`Choice`, the values that the loop can take, such as
            ``{"micro_batches": (1, 2), "release": (False,)}``. Other fields may have any. It is
            still looked at whether the losses of parts add up.
        choice: that another call has made: its ``fitted.choice``, or what
            ``fitted.choice.to_json()`` returned. It is planned, refused if it is above the budget,
            and applied, and nothing is measured: for a run that is resumed. What it needs need not
            be allowed again.
        group: the ranks that train together. All of them call this, and all take one choice: see
            :func:`headroom.fitting.agree.agreed`. None: all ranks, where there are several.

    Raises:
        DoesNotFit: no choice fits the budget, or not the one that was given. Says which floor was
            hit, and what would help.
        PlanError: the step cannot be planned; see :func:`headroom.plan`.
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    with together(group):
        check_margin(margin)
        check_only(only)
        if ladder is not None and not isinstance(ladder, Ladder):
            raise TypeError(f"ladder is {ladder!r}, wanted what headroom.ladder returned")
        if adapt and choice is not None:
            raise ValueError(
                "adapt and choice were both given: adapt needs times, and nothing is measured for "
                "a given choice"
            )
        asked = Asked(
            model, sample_batch, optimizer, loss, forward, device, amp, scaler, max_grad_norm,
            allow, only, choice, _parts_add_up,
        )  # fmt: skip
        search = search_of(asked)
        if ladder is not None:
            search = ladder.search_for(search)
        families, stored = search.families, asked.stored
        techniques, setting = families.techniques, families.setting
        source = search if stored is None else Stored(families, stored)
        held = sum(x.nbytes for x in {*model.parameters(), *model.buffers()})
        limit = budget_of(budget, target, setting.device, held)
        room = within(limit, margin, setting.device, len(Blocks(model).names))

    def propose(room: int) -> Found:
        if source is search and ladder is None:
            error = below_every_choice(families, limit, room)
            if error is not None:
                raise error
        found = source.best(room)
        if found is None:
            raise does_not_fit(search, limit, room)
        return found

    found = best_of_ranks(source, propose, room, group)
    applied = None
    try:
        with together(group):
            report = report_of(search, found) if stored is None else {}
            chosen = techniques.optimizer_of(found.choice)
            if not dry_run:
                applied = Applied(model, found.blocks, chosen, found.choice)
        outer = search.outer_of(found.choice) if stored is None else None
        loop = Loop(
            setting.but(batch=None), chosen, asked.live_scaler, max_grad_norm, families.rule
        )
        notes = [*techniques.notes, *families.notes]
        parting = None
        if not dry_run:
            counts = techniques.micro_batches
            parting = Parting(loop, counts, sample_batch, families.agree, notes)
        return Fitted(
            model,
            chosen,
            found.choice,
            limit,
            found.plan,
            found.plan.total_bytes,
            found.seconds if stored is None else None,
            blocks=list(found.blocks),
            notes=notes,
            within=room,
            planner=search.plan_of if adapt else None,
            estimate=None if outer is None else outer.at,
            is_given=stored is not None,
            bucket_bytes=bucket_of(model, found.choice) if found.choice.release else None,
            _loop=loop,
            _applied=applied,
            _adapts=adapt,
            _sample_bytes=bytes_of(sample_batch),
            _parting=parting,
            **report,
        )
    except BaseException:  # of this rank or another, and Ctrl-C
        if applied is not None:
            applied.undo()
        raise
