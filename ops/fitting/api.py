"""``headroom.fit``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._core.sizes import parse_bytes
from ..patching.levels import Blocks
from ..release import bucket_of
from ..step.description import Step
from .apply.applied import Applied
from .apply.fitted import Fitted
from .arguments import allowed_of, budget_of, check_margin, check_only, checked, host_room, within
from .choice import Choice
from .costs.outline import evaluation_of
from .ranks import from_first, gathered, together
from .report import Chosen
from .search.candidates import Candidates
from .search.changes import changes_of, peak_before
from .search.refusal import does_not_fit, given_does_not_fit
from .search.search import Search
from .search.techniques import techniques_of


def fit(
    model: nn.Module,
    sample_batch: Any,
    *,
    budget: int | float | str | None = None,
    target: str | None = None,
    host_budget: int | str | None = None,
    optimizer: Any = None,
    loss: Callable[..., Tensor] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    amp: torch.dtype | None = None,
    scaler: Any = None,
    max_grad_norm: float | None = None,
    prefetch: bool = False,
    allow: Sequence[str] = (),
    margin: float | None = None,
    ladder: Any = None,
    dry_run: bool = False,
    only: Mapping[str, Collection[Any]] | None = None,
    choice: Choice | Mapping[str, Any] | None = None,
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
            :meth:`Fitted.undo` takes that back, but for bits of weights that were rounded.
        sample_batch: a batch as training will see it: the largest, if they differ.
        budget: bytes, such as "6 GiB", that parameters, optimizer state, gradients, activations
            and, on CUDA, the allocator and the context may take together.
        target: "speed", instead of a budget: as fast as possible within the memory of the device,
            of which 20 % is left on the CPU, and 5 % on CUDA.
        host_budget: bytes, such as "32 GiB", that the host may hold of the optimizer's state and of
            what blocks keep for their backward pass, in the arena of the process. What leaves the
            device is copied in every step, and changes no result. None: nothing leaves it.
        optimizer: of the model's parameters, or a function that makes one from a list of them,
            such as a class. Adam, AdamW, Lion, Muon, and SGD with momentum may be replaced, with
            all options of each group; then :attr:`Fitted.optimizer` is another one, and schedulers
            are to be made of that. None: :class:`torch.optim.AdamW`.
        loss, forward: how the loss is computed, as in :func:`headroom.plan`: a mean over samples,
            or over labels that are not -100, for which micro-batches are weighed. Give a batch with
            such labels if there will be any: it shows which.
        device: where the model is; needed if it is on several.
        amp: a dtype to run the forward pass and the loss in, under :class:`torch.autocast`.
        scaler: the :class:`torch.amp.GradScaler` of the loop.
        max_grad_norm: gradients are clipped to this norm before the step.
        prefetch: batches come from a :class:`headroom.data.DevicePrefetcher`, which holds the next
            one on a GPU meanwhile.
        allow: of "8bit" (moments of 8 bits), "bf16" (weights of 16 bits, with 16 more that the
            optimizer keeps; weights that it lacks, such as the frozen ones beside a LoRA, are
            rounded for good), "adafactor", "act8" (blocks may keep their inputs in 8 bits, as at
            "L5:8bit" of :class:`headroom.nn.Block`), and "int8" and "nf4", by which the frozen
            weights of linear layers are quantized as by :func:`headroom.quantize`, for good, where
            nothing fits otherwise.
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
        group: the ranks that train together, all of which call this. The first of them chooses, for
            the least budget of all, and the others take its choice. None: all ranks, where there
            are several.

    Raises:
        DoesNotFit: no choice fits the budget, or not the one that was given. Says which floor was
            hit, and what would help.
        PlanError: the step cannot be planned; see :func:`headroom.plan`.
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    where = None if device is None else torch.device(device)
    step = Step(
        model, optimizer, sample_batch, loss, forward, where, amp, scaler,
        max_grad_norm=max_grad_norm, prefetch=prefetch,
    )  # fmt: skip
    return fit_step(
        step, budget=budget, target=target, host_budget=host_budget, allow=allow, margin=margin,
        ladder=ladder, dry_run=dry_run, only=only, choice=choice, group=group,
    )  # fmt: skip


def fit_step(
    step: Step,
    *,
    budget: int | float | str | None = None,
    target: str | None = None,
    host_budget: int | str | None = None,
    allow: Sequence[str] = (),
    margin: float | None = None,
    ladder: Any = None,
    dry_run: bool = False,
    only: Mapping[str, Collection[Any]] | None = None,
    choice: Choice | Mapping[str, Any] | None = None,
    group: Any = None,
    parts_add_up: bool = False,
) -> Fitted:
    """Fits a step into a budget, and returns what was done.

    Args:
        step: as a user describes it.
        parts_add_up: whether a loop itself weighs the losses of parts of a batch, so that they are
            not compared with the loss of the batch.

    All other arguments and the errors are those of :func:`fit`.
    """
    with together(group):
        check_margin(margin)
        check_only(only)
        given = None if choice is None else Choice.from_json(choice)
        allowed = allowed_of(allow, () if given is None else given.needs)
        step = checked(step)
        host = host_room(host_budget)
        techniques = techniques_of(step, allowed, only, parts_add_up, host is not None, given)
        search = Search(Candidates(techniques, host), given)
        if ladder is not None:
            if not hasattr(ladder, "_search_for"):
                raise TypeError(f"ladder is {ladder!r}, wanted what headroom.ladder returned")
            search = ladder._search_for(search)
        model, candidates = step.model, search.candidates
        assert step.device is not None
        held = sum(x.nbytes for x in {*model.parameters(), *model.buffers()})
        limit = budget_of(budget, target, step.device, held)
        room = within(limit, margin, step.device, len(Blocks(model).names))
    rooms = gathered(lambda: (room, host), group=group)
    least = min(size for size, _ in rooms)
    candidates.host_room = min((size for _, size in rooms if size is not None), default=None)
    chosen = from_first(lambda: _chosen(search, limit, least), group=group)
    applied = None
    try:
        with together(group):
            candidates.agree, candidates.rule = chosen.agree, chosen.rule
            found = candidates.taken(chosen.choice)
            if not search.fits(found.plan, room):  # of a larger batch than the first rank's
                raise given_does_not_fit(found.choice, found.plan, room, candidates.host_room)
            optimizer = candidates.techniques.optimizer_of(chosen.choice)
            if not dry_run:
                layers = candidates.techniques.layers
                applied = Applied(model, found.blocks, optimizer, chosen.choice, layers)
        if found.plan.timeline.peak_index >= evaluation_of(step, found.plan):
            chosen.notes.append("the predicted peak is that of evaluation; steps take less")
        counts = candidates.techniques.micro_batches
        agree = chosen.agree if len(counts) > 1 else False
        candidate = search.known.get(chosen.choice.but(levels=()))
        return Fitted(
            **vars(chosen) | {"agree": agree},
            model=model,
            optimizer=optimizer,
            budget=limit,
            host_budget=None if host_budget is None else parse_bytes(host_budget, "host_budget"),
            plan=found.plan,
            predicted_peak=found.plan.total_bytes,
            predicted_host=found.plan.host_peak_bytes,
            blocks=list(found.blocks),
            within=room,
            is_given=given is not None,
            bucket_bytes=bucket_of(model, chosen.choice.dtype) if chosen.choice.release else None,
            # The batch is held as long as the gradients of its parts may still be compared.
            _step=step.but(
                optimizer=optimizer,
                batch=step.batch if applied and agree is None else None,
                part_of=None,
            ),
            _applied=applied,
            _counts=counts,
            _estimate=None if candidate is None else candidate.estimate,
        )
    except BaseException:  # of this rank or another, and Ctrl-C
        if applied is not None:
            applied.undo()
        raise


def _chosen(search: Search, budget: int, within: int) -> Chosen:
    """Returns what is chosen for a budget, of which a plan may take ``within`` bytes.

    Raises:
        DoesNotFit: nothing fits.
    """
    found, candidates = search.best(within), search.candidates
    if found is None:
        if search.given is not None:
            plan = candidates.taken(search.given).plan
            raise given_does_not_fit(search.given, plan, within, candidates.host_room)
        leanest = search.leanest()
        raise does_not_fit(candidates, search.every(), leanest, budget, within)
    if search.given is not None:
        return Chosen(found.choice, candidates.agree, candidates.rule, notes=candidates.notes)
    before = peak_before(candidates, search.known, found)
    changes, seconds = changes_of(candidates, search.known, found, before)
    return Chosen(
        found.choice,
        candidates.agree,
        candidates.rule,
        candidates.notes,
        found.seconds,
        before,
        seconds,
        changes,
        search.frontier(),
        search.frontier(found.choice),
    )
