"""``headroom.forecast``: the peak of every step of an epoch whose batches differ in size."""

from __future__ import annotations

import math
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
from .polynomials import TOLERANCE, Form, Polynomials, sizes_of

__all__ = ["Forecast", "Remedy", "forecast"]

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
    """The memory of every step of an epoch.

    Attributes:
        peak_bytes: of each step, the most bytes of tensors that are live at once, as in
            :class:`headroom.planning.Plan`.
        total_bytes: of each step, what the process takes on the device; the peak on the CPU.
        sizes: of each step, the sizes that differ between batches, by tensor and dimension.
        budget: the bytes that there are, or None.
        plans: how many plans were made.
        error: the largest difference between a plan that was made to check and what was foretold
            of it, as a fraction of the plan.
    """

    peak_bytes: list[int]
    total_bytes: list[int]
    sizes: list[dict[str, int]]
    budget: int | None
    plans: int
    error: float
    _epoch: _Epoch = field(repr=False, compare=False)

    @property
    def over(self) -> list[int]:
        """Returns the steps that do not fit into the budget, of which a thousandth is left free:
        so much may a step be off. None if there is no budget."""
        within = self._within
        return [step for step, size in enumerate(self.total_bytes) if size > within]

    @property
    def _within(self) -> float:
        return math.inf if self.budget is None else self.budget / (1 + TOLERANCE)

    @property
    def fits(self) -> bool:
        """Returns whether every step fits into the budget."""
        return not self.over

    def worst(self, count: int = 20) -> list[int]:
        """Returns the steps that take the most, the largest first."""
        sizes = list(zip(self.total_bytes, self.peak_bytes))
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
        for color, label, steps in (
            ("#0072B2", "fits" if self.budget else "", set(range(len(self.total_bytes))) - over),
            ("#D55E00", "does not fit", over),
        ):
            if steps:
                at = sorted(steps)
                heights = [self.total_bytes[step] / unit for step in at]
                axes.scatter(at, heights, s=14 if len(at) < 500 else 5, color=color, label=label)
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
        ordered = sorted(self.total_bytes)
        lines = [
            f"{steps} steps: at most {format_bytes(ordered[-1])}, the median "
            f"{format_bytes(ordered[steps // 2])}",
            f"foretold by {self.plans} plans; checked to {100 * self.error:.2f} %",
        ]
        if self.budget is not None:
            over = len(self.over)
            words = f"{over} do not fit" if over else "all fit"
            lines.append(f"of a budget of {format_bytes(self.budget)}: {words}")
        lines += ["", f"{'step':>8}{'bytes':>12}  sizes"]
        for step in self.worst(top):
            sizes = ", ".join(f"{name} {size}" for name, size in self.sizes[step].items())
            lines.append(f"{step:>8}{format_bytes(self.total_bytes[step]):>12}  {sizes}"[:80])
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
    """Returns the memory that each step of an epoch will need, before the first one runs.

    A plan is made for a few sizes of batches. Between them every allocation of a step is a
    polynomial of the sizes, which the plans determine exactly; further plans, at sizes drawn at
    random and where the peak is the largest, check it, and where one differs by more than a
    thousandth, sizes are divided and planned again.

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
    with progress_bar(epoch.distinct, "forecast", unit="size", shown=progress) as bar:
        return epoch.foretold(size, bar.update)


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
        self._of_step: list[tuple[Form, tuple[int, ...]]] = []
        self._known: dict[Form, Polynomials] = {}
        for number, item in enumerate(lengths):
            if collate is not None:
                item = _lengths(item, number)
                self.lengths.append(item)
            self._of_step.append(self._added(self._made(item)))
        if not self._of_step:
            raise ValueError("lengths is empty: there is no step to foretell")

    @property
    def distinct(self) -> int:
        """Returns how many batches differ in size."""
        return sum(len(form.batches) for form in self._forms.values())

    def _made(self, item: Any) -> Any:
        return item if self._collate is None else self._collate(item)

    def _added(self, batch: Any) -> tuple[Form, tuple[int, ...]]:
        found = Form(batch)
        form = self._forms.setdefault(found.key, found)
        return form, form.add(batch)

    def batch(self, step: int) -> Any:
        form, sizes = self._of_step[step]
        return form.batches[sizes]

    def plan(self, batch: Any, **changed: Any) -> Plan:
        model, optimizer, options = self._planned
        return plan(model, optimizer, batch, **options | changed)

    def _plan_of_step(self, batch: Any) -> Plan:
        """Returns the plan of one of the epoch's batches; an error says of which step it is."""
        try:
            return self.plan(batch)
        except PlanError as error:
            step = next(n for n in range(len(self._of_step)) if self.batch(n) is batch)
            sizes = ", ".join(f"{name} {size}" for name, size in self.sizes(step).items())
            where = f"step {step}" + (f", of {sizes}" if sizes else "")
            raise PlanError(f"{where}: {error}") from error

    def sizes(self, step: int) -> dict[str, int]:
        form, sizes = self._of_step[step]
        return form.named(sizes)

    def foretold(self, budget: int | None, covered: Callable[[int], Any]) -> Forecast:
        for form in self._forms.values():
            self._known[form] = Polynomials(form, self._plan_of_step, covered)
        peaks = [self._known[form].peaks[form.point(sizes)] for form, sizes in self._of_step]
        begun, *others = peaks
        known = self._known.values()
        return Forecast(
            [begun.first, *(one.steady for one in others)],
            [begun.first + begun.share, *(one.steady + one.share for one in others)],
            [*map(self.sizes, range(len(peaks)))],
            budget,
            sum(each.plans for each in known),
            max(each.error for each in known),
            self,
        )

    # ---- ways out --------------------------------------------------------------------------------

    def remedies(self, found: Forecast) -> list[Remedy]:
        remedies, within = [], found._within
        if self.lengths and (limit := self._limit(found, within)) is not None:
            remedies.append(limit)
        if (cut := self._micro_batches(self.batch(found.worst(1)[0]), within)) is not None:
            remedies.append(cut)
        largest, *others = [self.plan(batch).advice() for batch in self._largest(found)]
        for each in largest:
            plans = [each.plan, *(a.plan for more in others for a in more if a.name == each.name)]
            total = max(one.total_bytes for one in plans)
            is_known = len(plans) == 1 + len(others)
            if is_known and total <= within and "micro-batches" not in each.name:
                remedies.append(Remedy(each.name, total, each.code))
        return remedies

    def _largest(self, found: Forecast) -> list[Any]:
        """Returns the batch of the step that takes the most, and those of the steps that do not fit
        and have the most of a size, which may take the most once a step has changed."""
        steps = found.worst(1)
        for form in self._forms.values():
            over = [step for step in found.over if self._of_step[step][0] is form]
            for name in self.sizes(over[0]) if over else ():
                steps.append(max(over, key=lambda step: (self.sizes(step)[name], -step)))
        return [*{id(batch): batch for batch in map(self.batch, steps)}.values()]

    def _limit(self, found: Forecast, within: float) -> Remedy | None:
        """Returns the longest sequences with which all steps fit, if longer ones are cut."""

        def most(limit: int) -> int:
            cut = {tuple(min(n, limit) for n in self.lengths[step]) for step in found.over}
            return max(self._total(self._made([*one])) for one in cut)

        fitting, not_fitting = 0, max(max(self.lengths[step]) for step in found.over)
        while not_fitting - fitting > 1:
            middle = (fitting + not_fitting) // 2
            if most(middle) <= within:
                fitting = middle
            else:
                not_fitting = middle
        if not fitting:
            return None
        kept = [size for size in found.total_bytes if size <= within]
        return Remedy(
            f"sequences of at most {fitting}",
            max(most(fitting), *kept, 0),
            f"tokens = tokens[:{fitting}]  # of each sequence",
        )

    def _total(self, batch: Any) -> int:
        """Returns what a step takes whose batch is not one of the epoch's."""
        form, sizes = self._forms.get(Form(batch).key), sizes_of(batch)
        if form is not None and form.has(sizes):
            found = self._known[form].between(form.point(sizes))
            if found is not None:
                return found.steady + found.share
        return self.plan(batch).total_bytes

    def _micro_batches(self, worst: Any, within: float) -> Remedy | None:
        """Returns the fewest micro-batches with which all batches fit, if there are any; ``worst``
        is looked at first."""
        model, optimizer, options = self._planned
        batches = [batch for form in self._forms.values() for batch in form.batches.values()]
        count = 2
        while count <= min(MOST_PARTS, samples_of(worst) or 0):
            changed = options | {"accumulation": count}
            try:
                total = plan(model, optimizer, largest_part(worst, count), **changed).total_bytes
                if total <= within:
                    # The first one twice: of the first step, only the first step is foretold.
                    each = [largest_part(batch, count) for batch in [*batches, batches[0]]]
                    cut = _Epoch(model, optimizer, changed, None, each).foretold(None, _ignored)
                    step = cut.worst(1)[0]
                    total, worst = cut.total_bytes[step], batches[step % len(batches)]
            except PlanError:
                return None
            if total <= within:
                return Remedy(
                    f"{count} micro-batches",
                    total,
                    f"for part, weight in headroom.micro_batches(batch, {count}):\n"
                    "    with accumulator.micro_batch(weight=weight):  # headroom.GradAccumulator\n"
                    "        loss_of(model, part).backward()",
                )
            count *= 2
        return None


def _ignored(count: int) -> None:
    """Shows no progress."""
