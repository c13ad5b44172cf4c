"""``headroom.forecast``: the largest steps of an epoch whose batches differ in size."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from .._core import drawing
from .._core.progress import progress_bar
from .._core.randomness import loader_kept
from .._core.sizes import format_bytes, parse_bytes
from ..planning import Plan, plan
from ..step.errors import PlanError
from ..step.micro_batches import largest_part, samples_of
from .forms import Form, Steps, next_planned

__all__ = ["Forecast", "Remedy", "forecast"]

LARGEST = 20  # steps that are planned exactly
MOST_PARTS = 64
SHOWN = 8  # steps in the table


@dataclass(frozen=True)
class Remedy:
    """A change with which all steps fit.

    Attributes:
        name: of the change.
        total_bytes: what the largest step takes with it.
        code: lines to paste.
    """

    name: str
    total_bytes: int
    code: str

    def __str__(self) -> str:
        code = "\n".join(f"    {line}" for line in self.code.splitlines())
        return f"{self.name}: {format_bytes(self.total_bytes)}\n{code}"


@dataclass(frozen=True)
class Forecast:
    """The memory that the steps of an epoch need. Of a step that is not exact, the bytes are those
    of a planned batch that is at least as large in every size: it needs at most so much.

    Attributes:
        peak_bytes: of each step, the most bytes of tensors that are live at once, as in
            :class:`headroom.planning.Plan`.
        total_bytes: of each step, what the process takes on the device; the peak on the CPU.
        is_exact: of each step, whether its bytes are exact. Those of the largest 20 are.
        sizes: of each step, the sizes that differ between batches, by tensor and dimension.
        budget: the bytes that there are, or None.
        plans: how many plans were made.
    """

    peak_bytes: list[int]
    total_bytes: list[int]
    is_exact: list[bool]
    sizes: list[dict[str, int]]
    budget: int | None
    plans: int
    _epoch: _Epoch = field(repr=False, compare=False)

    @property
    def over(self) -> list[int]:
        """Returns the steps that do not fit into the budget; none if there is no budget."""
        if self.budget is None:
            return []
        return [step for step, size in enumerate(self.total_bytes) if size > self.budget]

    @property
    def fits(self) -> bool:
        """Returns whether every step fits into the budget."""
        return not self.over

    def worst(self, count: int = LARGEST) -> list[int]:
        """Returns the steps that take the most, the largest first."""
        sizes = list(zip(self.total_bytes, self.peak_bytes, self.is_exact))
        return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:count]

    def batch(self, step: int) -> Any:
        """Returns a batch of the sizes of a step's: to warm up with, for instance."""
        return self._epoch.batch(step)

    def plan(self, step: int) -> Plan:
        """Returns the plan of a step."""
        return self._epoch.plan(self.batch(step))

    def ways_out(self) -> list[Remedy]:
        """Returns changes with each of which all steps would fit: a limit on the lengths, where
        these were given; micro-batches; levels and what else :meth:`Plan.advice` knows. The last
        are planned for the step that takes the most, and for those of the steps that do not fit
        which have the most rows or tokens.

        Raises:
            ValueError: no budget was given.
        """
        if self.budget is None:
            raise ValueError("there is no budget to fit into: give budget= to headroom.forecast")
        return self._epoch.remedies(self) if self.over else []

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of what each step takes, beside the budget.

        Raises:
            ImportError: matplotlib is missing.
            OSError: the file cannot be written.
        """
        unit, name = drawing.byte_unit(max(self.total_bytes))
        figure = drawing.new_figure(9.5, 3.8)
        axes = figure.subplots()
        over = set(self.over)
        exact = {step for step, is_exact in enumerate(self.is_exact) if is_exact}
        every = {*range(len(self.total_bytes))}
        for color, alpha, label, steps in (
            ("#0072B2", 1, "exact", exact - over),
            ("#0072B2", 0.3, "at most", every - exact - over),
            ("#D55E00", 1, "does not fit", over & exact),
            ("#D55E00", 0.3, "does not fit, at most", over - exact),
        ):
            if steps:
                at = sorted(steps)
                heights = [self.total_bytes[step] / unit for step in at]
                axes.scatter(
                    at, heights, s=14 if len(every) < 500 else 5, color=color, alpha=alpha,
                    label=label,
                )  # fmt: skip
        if self.budget is not None:
            axes.axhline(
                self.budget / unit, color=drawing.INK, linewidth=1, linestyle="--",
                label=f"budget {format_bytes(self.budget)}",
            )  # fmt: skip
        axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=drawing.INK)
        axes.set_ylim(0, 1.12 * max(*self.total_bytes, self.budget or 0) / unit)
        axes.set_xlabel("step", color=drawing.FAINT, fontsize=8.5)
        axes.set_ylabel(f"{name} at the peak", color=drawing.FAINT, fontsize=8.5)
        axes.grid(color=drawing.LINE, linewidth=0.7)
        drawing.plain_axes(axes, f"Foretold memory of {len(self.total_bytes)} steps")
        drawing.save_png(figure, path)

    def table(self, top: int = SHOWN) -> str:
        """Returns the largest steps as text of at most 80 columns."""
        steps = len(self.total_bytes)
        lines = [
            f"{steps} steps: at most {format_bytes(max(self.total_bytes))}",
            f"{self.plans} plans: {sum(self.is_exact)} steps exact, others bounded from above",
        ]
        if self.budget is not None:
            over = len(self.over)
            words = f"{over} do not fit" if over else "all fit"
            lines.append(f"of a budget of {format_bytes(self.budget)}: {words}")
        lines += ["", f"{'step':>8}{'bytes':>15}  sizes"]
        for step in self.worst(top):
            sizes = ", ".join(f"{name} {size}" for name, size in self.sizes[step].items())
            size = ("" if self.is_exact[step] else "<= ") + format_bytes(self.total_bytes[step])
            lines.append(f"{step:>8}{size:>15}  {sizes}"[:80])
        return "\n".join(lines)

    __str__ = table


def forecast(
    model: Any,
    optimizer: Any = None,
    lengths: Iterable[Any] = (),
    *,
    collate: Callable[[list[int]], Any] | None = None,
    budget: int | str | None = None,
    progress: bool = True,
    **options: Any,
) -> Forecast:
    """Returns what the largest steps of an epoch will need, before the first one runs.

    Of two batches that differ in nothing but sizes, one that is at least as large in every size
    (rows, length and so on) is taken to need at least as much. So the peak of the epoch is that of
    a batch that no other one exceeds in every size: these are planned first, and then the next
    smaller ones, until the 20 steps that need the most are known exactly. With a budget, more are
    planned until it is known of each step whether it fits.

    What any other step needs is not foretold but bounded, by the smallest planned batch that is at
    least as large. A step that needs less memory for a longer batch, such as one that computes in
    another way from some length on, is no exception that is looked for.

    Args:
        model, optimizer: as in :func:`headroom.plan`.
        lengths: the batches of the epoch in their order: a ``DataLoader``, whose order is then
            that of the next epoch, or any iterable of batches. With ``collate``, of each step a
            length, or a list of lengths, of the sequences in its batch.
        collate: makes a batch from a list of lengths.
        budget: what there is, in bytes or as "16 GiB".
        progress: shows a bar.
        options: those of :func:`headroom.plan`: ``loss``, ``device``, ``amp``, ``accumulation``
            (each batch is a micro-batch then) and so on.

    Raises:
        PlanError: a batch cannot be planned.
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    size = None if budget is None else parse_bytes(budget, "budget")
    if isinstance(lengths, Dataset):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}: give a DataLoader over it, which makes batches"
        )
    with loader_kept(lengths):
        epoch = _Epoch(model, optimizer, options, collate, lengths)
    with progress_bar(None, "forecast", unit="plan", shown=progress) as bar:
        return epoch.foretold(LARGEST, size, bar.update)


def _lengths(item: Any, number: int) -> list[int]:
    """Returns the lengths of a step, which may be numbers of NumPy or in tensors."""
    try:
        found = [operator.index(item)]
    except TypeError:
        try:
            found = [operator.index(one) for one in item]
        except TypeError:
            found = []
    if not found or min(found) < 1:
        raise ValueError(
            f"lengths[{number}] is {found or item!r}, wanted a length above 0 or a list of them"
        )
    return found


class _Epoch:
    """The batches of an epoch, and what is known of their plans."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        options: dict[str, Any],
        collate: Callable[[list[int]], Any] | None,
        lengths: Iterable[Any],
    ) -> None:
        self._planned = (model, optimizer, options)
        self._collate = collate
        self.lengths: list[list[int]] = []
        self._forms: dict[Any, Form] = {}
        self._steps: list[Steps] = []  # of each step, those of the same sizes
        known: dict[Any, Steps] = {}
        for number, item in enumerate(lengths):
            if collate is not None:
                item = _lengths(item, number)
                self.lengths.append(item)
            batch = item if collate is None else collate(item)
            form = Form(batch)
            form = self._forms.setdefault(form.key, form)
            sizes, is_first = form.add(batch), not number
            alike = known.setdefault((form, sizes, is_first), Steps(form, sizes, is_first))
            alike.count += 1
            self._steps.append(alike)
        if not self._steps:
            raise ValueError("lengths is empty: there is no step to foretell")

    def batch(self, step: int) -> Any:
        return self._steps[step].batch

    def sizes(self, step: int) -> dict[str, int]:
        steps = self._steps[step]
        return steps.form.named(steps.sizes)

    def plan(self, batch: Any) -> Plan:
        model, optimizer, options = self._planned
        return plan(model, optimizer, batch, **options)

    def _plan_of(self, steps: Steps) -> Plan:
        """Returns the plan of steps; an error says which is the first."""
        try:
            return self.plan(steps.batch)
        except PlanError as error:
            step = self._steps.index(steps)
            sizes = ", ".join(f"{name} {size}" for name, size in self.sizes(step).items())
            where = f"step {step}" + (f", of {sizes}" if sizes else "")
            raise PlanError(f"{where}: {error}") from error

    def foretold(
        self,
        largest: int,
        budget: int | None = None,
        planned: Callable[[int], Any] = lambda count: None,
    ) -> Forecast:
        """Returns what the steps need, so many of the largest ones exactly."""
        known, plans = list(dict.fromkeys(self._steps)), 0
        while (steps := next_planned(known, largest, budget)) is not None:
            found = self._plan_of(steps)
            for other in known:
                other.learn(steps.form, steps.sizes, found)
            plans += 1
            planned(1)
        return Forecast(
            [int(steps.most.peak) for steps in self._steps],
            [int(steps.most.total) for steps in self._steps],
            [steps.is_exact for steps in self._steps],
            [*map(self.sizes, range(len(self._steps)))],
            budget,
            plans,
            self,
        )

    def _peak(self, batches: list[Any], **changed: Any) -> tuple[int, int]:
        """Returns the most that other batches take on the device, and which of them does."""
        model, optimizer, options = self._planned
        # The first one twice: of the first step, only the first step is foretold.
        epoch = _Epoch(model, optimizer, options | changed, None, [*batches, batches[0]])
        found = epoch.foretold(1)
        step = found.worst(1)[0]
        return found.total_bytes[step], step % len(batches)

    # ---- ways out --------------------------------------------------------------------------------

    def remedies(self, found: Forecast) -> list[Remedy]:
        assert found.budget is not None
        remedies, budget = [], found.budget
        if self.lengths and (limit := self._limit(found, budget)) is not None:
            remedies.append(limit)
        if (cut := self._micro_batches(self.batch(found.worst(1)[0]), budget)) is not None:
            remedies.append(cut)
        largest, *others = [self.plan(batch).advice() for batch in self._largest(found)]
        for each in largest:
            plans = [each.plan, *(a.plan for more in others for a in more if a.name == each.name)]
            total = max(one.total_bytes for one in plans)
            is_known = len(plans) == 1 + len(others)
            if is_known and total <= budget and "micro-batches" not in each.name:
                remedies.append(Remedy(each.name, total, each.code))
        return remedies

    def _largest(self, found: Forecast) -> list[Any]:
        """Returns the batch of the step that takes the most, and those of the steps that do not fit
        and have the most of a size, which may take the most once a step has changed."""
        steps = found.worst(1)
        for form in self._forms.values():
            over = [step for step in found.over if self._steps[step].form is form]
            for name in self.sizes(over[0]) if over else ():
                steps.append(max(over, key=lambda step: (self.sizes(step)[name], -step)))
        return [*{id(batch): batch for batch in map(self.batch, steps)}.values()]

    def _limit(self, found: Forecast, budget: int) -> Remedy | None:
        """Returns the longest sequences with which all steps fit, if longer ones are cut."""
        collate = self._collate
        assert collate is not None

        def most(limit: int, steps: Iterable[int]) -> int:
            cut = {tuple(min(n, limit) for n in self.lengths[step]) for step in steps}
            return self._peak([collate([*one]) for one in cut])[0]

        fitting, not_fitting = 0, max(max(self.lengths[step]) for step in found.over)
        while not_fitting - fitting > 1:
            middle = (fitting + not_fitting) // 2
            if most(middle, found.over) <= budget:
                fitting = middle
            else:
                not_fitting = middle
        if not fitting:
            return None
        return Remedy(
            f"sequences of at most {fitting}",
            most(fitting, range(len(self.lengths))),
            f"tokens = tokens[:{fitting}]  # of each sequence",
        )

    def _micro_batches(self, worst: Any, budget: int) -> Remedy | None:
        """Returns the fewest micro-batches with which all batches fit, if there are any; ``worst``
        is looked at first."""
        batches = [batch for form in self._forms.values() for batch in form.batches.values()]
        count = 2
        while count <= min(MOST_PARTS, samples_of(worst) or 0):
            try:
                total, _ = self._peak([largest_part(worst, count)], accumulation=count)
                if total <= budget:
                    each = [largest_part(batch, count) for batch in batches]
                    total, largest = self._peak(each, accumulation=count)
                    worst = batches[largest]
            except PlanError:
                return None
            if total <= budget:
                return Remedy(
                    f"{count} micro-batches",
                    total,
                    f"for part, weight in headroom.micro_batches(batch, {count}):\n"
                    "    with accumulator.micro_batch(weight=weight):  # headroom.GradAccumulator\n"
                    "        loss_of(model, part).backward()",
                )
            count *= 2
        return None
