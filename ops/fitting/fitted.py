"""A model that was fitted into a budget: its steps, what was changed, and how it turned out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..planning.result import Plan
from .adapt import adapt
from .apply import Applied
from .choice import Choice
from .loop import Loop
from .micro_batches import bytes_of, parts
from .releasing import bucket_of
from .search import SAME, FrontierPoint
from .shares import SAMPLES, shares
from .table import described, table

__all__ = ["Change", "Fitted"]

MEASURED = 2  # steps whose peak is measured
TIMED = 64  # of the latest steps whose times are kept
STRIDES = 4  # from the levels that were chosen to the leanest


@dataclass(frozen=True)
class Change:
    """What one technique changed.

    Attributes:
        technique: its name.
        bytes: how much more the peak is with it, by the estimates; mostly negative.
        seconds: how much more a step takes.
        before, after: in words.
    """

    technique: str
    bytes: int
    seconds: float
    before: str
    after: str


@dataclass(repr=False)
class Fitted:
    """What :func:`headroom.fit` returns.

    Attributes:
        model: that was given, changed in place unless ``dry_run`` was asked for.
        optimizer: to be stepped, and given to learning-rate schedulers.
        choice: how the model is trained; ``choice.to_json()`` can be stored, and given to
            :func:`headroom.fit` when the run is resumed.
        budget: bytes.
        plan: of a step with the choice.
        predicted_peak, predicted_seconds: of a step; bytes on the device. There are no seconds for
            a choice that was given.
        measured_peak: the most bytes of the first two steps, or None before them.
        before_peak, before_seconds: predicted for the model as it was given.
        changes: what each technique changed.
        frontier: the choices that no other beats, by ascending peaks, as far as they were looked
            at; their bytes are estimates.
        blocks: the names of the blocks that ``choice.levels`` is of.
        notes: what could not be used, and why.
        reachable: like ``frontier``, but of the choices that :meth:`set_levels` can reach.
        within: the budget without its margin.
        planner: returns the plan of a choice, or None.
    """

    model: nn.Module
    optimizer: Any
    choice: Choice
    budget: int
    plan: Plan
    predicted_peak: int
    predicted_seconds: float | None
    before_peak: int | None = None
    before_seconds: float | None = None
    changes: list[Change] = field(default_factory=list)
    frontier: list[FrontierPoint] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured_peak: int | None = None
    reachable: list[FrontierPoint] = field(default_factory=list)
    within: int = 0
    planner: Callable[[Choice], Plan] | None = None
    _loop: Loop | None = None
    _applied: Applied | None = None
    _adapts: bool = False
    _sample_bytes: int = 0  # of the batch that was planned
    _is_whole: bool = True  # whether measured batches were as large
    _counts: tuple[int, ...] = (1,)
    _steps: int = 0
    _times: list[float] = field(default_factory=list)

    # ---- training -------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor:
        """Makes a training step, of any number of micro-batches, and returns the loss of the batch,
        detached.

        The first two steps run under :func:`headroom.memory.track` on the CPU, unless a profiler
        runs already, and set ``measured_peak``: the first makes the optimizer's state, and the
        second is like all others. Later ones are timed.

        Raises:
            RuntimeError: the model was fitted with ``dry_run=True``, or :meth:`undo` was called.
            ValueError: the batch has no samples to make micro-batches of.
        """
        self._live()
        loop = self._loop
        assert loop is not None
        each = self.micro_batches(batch)
        if self._steps < MEASURED:
            loss, peak = loop.measured(batch, each)
            if peak is not None:
                self.measured_peak = max(peak, self.measured_peak or 0)
                self._is_whole &= bytes_of(batch) >= self._sample_bytes
        else:
            loss, seconds = loop.timed(each)
            self._times.append(seconds)
            del self._times[:-TIMED]
        self._steps += 1
        # Smaller batches than the sample do not say what that would leave.
        if self._adapts and self._is_whole and self._steps == MEASURED + 1:
            adapt(self)
        return loss

    def micro_batches(self, batch: Any) -> list[Any]:
        """Returns the parts of a batch that go through the model one after the other: in a loop of
        one's own, each part's loss is multiplied by its :meth:`shares`, and gradients add up. If
        the samples cannot be divided into equal parts, the last is smaller.

        Raises:
            ValueError: the batch has no samples.
        """
        return parts(batch, self.choice.micro_batches)

    def shares(self, micro_batches: Sequence[Any]) -> list[float]:
        """Returns the share that each part has in the loss of the batch: of its samples, or, where
        the loss is a mean over labels that are not -100, of these. A part with a share of 0 can be
        left out; its mean over nothing is nan.

        Args:
            micro_batches: what :meth:`micro_batches` returned.
        """
        return [float(share) for share in shares(micro_batches, self.rule)]

    @property
    def rule(self) -> str:
        """What the loss is a mean over; see :mod:`headroom.fitting.shares`."""
        return SAMPLES if self._loop is None else self._loop.rule

    @property
    def bucket_bytes(self) -> int | None:
        """The ``bucket_bytes`` of :func:`headroom.optim.release_gradients` with which gradients are
        released, or None if they are not."""
        return bucket_of(self.model, self.choice) if self.choice.release else None

    @property
    def measured_seconds(self) -> float | None:
        """The median time of the latest steps, from the third on, or None."""
        return statistics.median(self._times) if self._times else None

    @property
    def scaler(self) -> Any:
        """The scaler that losses are scaled by, or None."""
        return None if self._loop is None else self._loop.scaler

    def _live(self) -> Applied:
        if self._applied is None:
            raise RuntimeError(
                "the model was not changed: fit() it without dry_run=True, and before undo()"
            )
        return self._applied

    # ---- changes while it trains ----------------------------------------------------------------

    def set_levels(self, levels: Sequence[str]) -> None:
        """Sets the level of each block, between two steps. Later steps are measured anew."""
        if len(levels) != len(self.blocks):
            raise ValueError(f"levels has {len(levels)} names, wanted {len(self.blocks)}")
        self._live().set_levels(levels)
        self.choice = self.choice.but(levels=tuple(levels))
        self.measured_peak, self._steps, self._is_whole = None, 0, True
        self._times.clear()

    def leaner(self) -> bool:
        """Sets the next leaner choice that a running training can take, between two steps: leaner
        levels, in a few strides, and then more micro-batches. Returns whether there was one."""
        self._live()
        self._adapts = False  # what was measured before says less than why this is called
        here = self.same_but_levels()
        now = next((p.peak for p in here if p.choice == self.choice), self.predicted_peak)
        stride = max(1, (now - here[0].peak) // STRIDES) if here else 0
        below = [point for point in here if point.peak <= now - stride]
        if below:
            self.take(below[-1])
            return True
        more = [count for count in self._counts if count > self.choice.micro_batches]
        if not more or self.choice.release:
            return False
        self.choice = self.choice.but(micro_batches=more[0])
        return True

    def same_but_levels(self) -> list[FrontierPoint]:
        """Returns all choices that differ from this one in their levels alone and that no other of
        these beats, by ascending peaks."""
        bare = self.choice.but(levels=())
        return [point for point in self.reachable if point.choice.but(levels=()) == bare]

    def take(self, point: FrontierPoint, plan: Plan | None = None) -> None:
        """Sets the levels of another choice, whose estimates are the predictions from then on."""
        self.set_levels(point.choice.levels)
        self.predicted_peak, self.predicted_seconds = point.peak, point.seconds
        if plan is not None:
            self.plan, self.predicted_peak = plan, plan.total_bytes

    def undo(self) -> None:
        """Gives the model back what it had: levels, layers, the dtype of its weights, and
        gradients that stay. With weights in bfloat16 those that the optimizer trains are those of
        the float32 run, bit for bit; buffers, and weights that the optimizer lacks, have lost bits
        if they were cast. The optimizer stays this one. A second call does nothing."""
        if self._applied is not None:
            self._applied.undo()
            self._applied = None

    # ---- the report -----------------------------------------------------------------------------

    @property
    def next_up(self) -> FrontierPoint | None:
        """The next choice that is faster and takes more, or None."""
        seconds = (1 - SAME) * (self.predicted_seconds or 0.0)
        better = [point for point in self.frontier if point.seconds < seconds]
        more = [point for point in better if point.peak > self.predicted_peak]
        return more[0] if more else None

    @property
    def next_down(self) -> FrontierPoint | None:
        """The next choice that takes less and is slower, or None."""
        peak = (1 - SAME) * self.predicted_peak
        less = [point for point in self.frontier if point.peak < peak]
        return less[-1] if less else None

    @property
    def is_given(self) -> bool:
        """Whether the choice was given, and not looked for."""
        return self.predicted_seconds is None

    @property
    def is_applied(self) -> bool:
        """Whether the model is changed now."""
        return self._applied is not None

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__  # notebooks show it

    def to_json(self) -> dict[str, Any]:
        """Returns the report in what :mod:`json` writes."""
        return described(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a Fitted holds hooks and an optimizer of one process, and cannot be pickled: save "
            "model.state_dict() and optimizer.state_dict(), and to_json() for the report"
        )
