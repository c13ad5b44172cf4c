"""``headroom.fit`` for loops of other libraries, which hold more than a loop of one's own, and the
base of the callbacks that call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._core.ranks import world_size
from .._core.sizes import format_bytes, parse_bytes
from ..fitting import Fitted
from ..fitting.api import fit_step
from ..fitting.choice import Choice
from ..fitting.ranks import RankError, together
from ..nn.experts import QuantizedExperts
from ..nn.quantized import QuantizedLinear
from ..step.description import Step
from ..step.errors import PlanError
from ..step.micro_batches import bytes_of, samples_of
from ..step.rules import rule_of
from .first_steps import ToldSteps
from .values import line_of

__all__ = [
    "OPTIMIZER_STAYS",
    "WHOLE_BATCHES",
    "FitsLoop",
    "batches_planned",
    "extra_bytes",
    "fit_in_loop",
    "kept_or_found",
    "mixed_precision",
    "optimizer_of_choice",
    "rule_of_parts",
    "weights_of_choice",
    "with_kept",
]

SCALARS = 4096  # losses, counts and norms that a loop keeps between its steps
WHOLE_BATCHES = "micro-batches: the losses of smaller batches do not add up to those of the loop's"


def extra_bytes(model: nn.Module, *held: Any) -> int:
    """Returns the bytes that a loop holds besides what is planned: on several ranks the buckets of
    DistributedDataParallel, and batches besides the part of one that is trained.

    Args:
        held: these batches.
    """
    extra = SCALARS + bytes_of(held)
    if world_size() > 1:
        extra += bytes_of([p for p in model.parameters() if p.requires_grad])
    return extra


def batches_planned(steps: int) -> int:
    """Returns how many of the ``steps`` batches that a loop accumulates are planned: from the
    second on gradients are there already, and all are alike."""
    return min(steps, 2)


def rule_of_parts(step: Step, rules: Sequence[str], steps: int) -> str | None:
    """Returns the rule by which losses of smaller batches add up to those that a loop computes, or
    None if there is none, such as for a loss that is a sum where the loop wants means.

    Args:
        step: with the batches that the loop accumulates as one.
        rules: of :mod:`headroom.step.micro_batches`.
        steps: how many batches these are.
    """
    samples = (samples_of(step.batch) or steps) // steps
    return rules[0] if samples < 2 else rule_of(step, rules)


def fit_in_loop(
    step: Step,
    *,
    budget: int | str | None,
    extra: int,
    who: str,
    only: Mapping[str, Any],
    **options: Any,
) -> Fitted:
    """Fits a step that someone else's loop makes into a budget, and returns what was done. The
    loop weighs the losses of parts of a batch itself, so that they are not compared again.

    Args:
        step: as it is described; of the batches that are planned.
        options: of :func:`headroom.fit`.
        budget: bytes, of which ``extra`` are left for the loop; None: the device's memory.
        who: the caller, for errors.
        only: the values that fields of a choice may have in this loop.

    Raises:
        ValueError: the budget is not even enough for ``extra``.
        headroom.fitting.DoesNotFit: it is not enough for any choice.
    """
    with together():
        if budget is None:
            options["target"] = "speed"
        else:
            size = parse_bytes(budget, "budget")
            if size <= extra:
                raise ValueError(
                    f"{who}: budget is {format_bytes(size)}, and the loop itself holds "
                    f"{format_bytes(extra)}; give a larger one"
                )
            options["budget"] = size - extra
    try:
        return fit_step(step, only=only, parts_add_up=True, **options)
    except PlanError as error:
        line = line_of(error.__cause__)
        if line is None:
            raise
        raise PlanError(
            f"{who}: {error}. This is at {line}. Without {who}, headroom.patch(model, 'L5') and "
            "smaller batches save memory where nothing can be planned"
        ) from error


def mixed_precision(accelerator: Any, *, who: str) -> dict[str, Any]:
    """Returns ``amp`` and ``scaler`` of a step for an accelerator."""
    known = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    name = accelerator.mixed_precision
    if name not in known:
        raise ValueError(
            f"{who}: mixed precision is {name!r}, which cannot be planned; wanted one of "
            f"{', '.join(known)}"
        )
    return {"amp": known[name], "scaler": accelerator.scaler}


# The values that fields of a choice may have where a schedule has been made of the optimizer.
OPTIMIZER_STAYS: Mapping[str, tuple[str, ...]] = {"optimizer": ("given",), "weights": ("given",)}


def optimizer_of_choice(kept: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the values that these fields may have in a run that resumes one with a choice, the
    state of whose optimizer has to fit."""
    return {name: (kept[name],) for name in OPTIMIZER_STAYS}


def weights_of_choice(kept: Mapping[str, Any], model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the format that frozen weights may have in a run that resumes one with a choice: the
    same, unless the model has such weights already."""
    kinds = QuantizedLinear, QuantizedExperts
    has_few_bits = any(isinstance(module, kinds) for module in model.modules())
    return {"frozen": ("given" if has_few_bits else Choice.from_json(kept).frozen,)}


def with_kept(allow: Sequence[str], kept: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns what may change the mathematics: what is allowed, and what the run does that is
    resumed."""
    taken = () if kept is None else Choice.from_json(kept).needs
    return tuple(dict.fromkeys((*allow, *taken)))


def kept_or_found(
    kept: Mapping[str, Any] | None, fitted: Callable[[Mapping[str, Any] | None], Fitted]
) -> Fitted:
    """Returns what is fitted with the choice of the run that is resumed, which takes no measuring;
    without it, if that is not possible any more. All ranks do the same, because a call of
    :func:`headroom.fit` that raises on one of them does on all.

    Args:
        kept: the choice, or None.
        fitted: fits with a choice, or searches for one.
    """
    reason = None
    if kept is not None:
        try:
            return fitted(kept)
        except (TypeError, ValueError, PlanError, RankError) as error:
            reason = str(error)
    found = fitted(None)
    if reason is not None:
        found.notes.append(f"the choice of the run that is resumed is not taken again: {reason}")
    return found


class FitsLoop:
    """Fits a training that another library's loop runs into a budget of memory, and measures its
    first steps.

    Args:
        budget: bytes, or text such as "6 GiB"; None: the memory of the device.
        allow: what may change the mathematics, as in :func:`headroom.fit`.
        host_budget: bytes that the host may hold of what leaves the device, as in
            :func:`headroom.fit`; None: nothing leaves it.
        sample_batch: a batch as the loader yields it, such as the worst one of
            :func:`headroom.forecast`. None: the largest of the first 256.
        tell: is called with the table of what was chosen, and after three steps with what was
            measured, on the first rank.

    Attributes:
        fitted: what :func:`headroom.fit` found, from the beginning of the training on.
        choice: its choice, as plain data, which checkpoints keep, with the budgets. A run that is
            resumed with the same budgets takes it again and measures nothing.
        measured: peak and time of the first steps.
        extra: bytes of the budget that the loop itself holds.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        allow: Sequence[str] = (),
        *,
        host_budget: int | str | None = None,
        sample_batch: Any = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.budget, self.host_budget = budget, host_budget
        self.allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self.sample_batch, self._tell = sample_batch, tell
        self.fitted: Fitted | None = None
        self.measured: ToldSteps | None = None
        self.choice: dict[str, Any] | None = None
        self.extra = 0
        self._batches = 1.0  # of a step, for each that was planned
        self._says = False  # on the first rank

    def _again(
        self, kept: Mapping[str, Any] | None, budget: Any, host_budget: Any = None
    ) -> Mapping[str, Any] | None:
        """Returns the choice that a checkpoint has kept if it was made within the same budgets, for
        which another search would find nothing better; else None."""
        same = list(map(_bytes, (budget, host_budget))) == list(
            map(_bytes, (self.budget, self.host_budget))
        )
        return kept if same else None

    def tell(self, text: str) -> None:
        """Tells on the first rank."""
        if self._says:
            self._tell(text)

    def _measure(
        self, model: nn.Module, optimizer: Any, device: torch.device, *, records: bool = True
    ) -> None:
        """Makes what measures the first steps."""
        assert self.fitted is not None
        told = self.fitted, self.extra, self._batches, self.tell
        self.measured = ToldSteps(model, optimizer, device, *told, records=records)


def _bytes(budget: Any) -> int | None:
    return None if budget is None else parse_bytes(budget, "budget")
