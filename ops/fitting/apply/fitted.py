"""A model that was fitted into a budget: its steps, what was changed, and how it turned out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...memory.first_steps import FirstSteps
from ...planning.device import context_bytes
from ...planning.result import Plan
from ...step.description import Step
from ...step.micro_batches import parts, shares
from ...step.out_of_memory import is_out_of_memory
from ...step.rules import NO_RULE, rule_of, rules_of
from ...step.run import train
from ..choice import SAME, Choice, FrontierPoint
from ..report import Chosen, described, report
from .applied import Applied

STRIDES = 4  # from the levels that were chosen to the leanest


@dataclass(repr=False, kw_only=True)
class Fitted(Chosen):
    """Holds a fitted model and its optimizer, and steps them: what :func:`headroom.fit` returns.

    Attributes:
        model: that was given, changed in place unless ``dry_run`` was asked for.
        optimizer: to be stepped, and given to learning-rate schedulers.
        choice: how the model is trained now; ``choice.to_json()`` can be stored, and given to
            :func:`headroom.fit` when the run is resumed.
        budget: bytes.
        host_budget: bytes that the host may hold; None: that was not asked for.
        plan: of a step with the choice. None after :meth:`set_levels` or :meth:`reduce_memory` has
            set one that was not planned.
        predicted_peak, predicted_host, predicted_seconds: of a step with the choice; bytes on the
            device, and on the host. After the choice was changed they are estimates, or None where
            nothing is known of the new one.
        blocks: the names of the blocks that ``choice.levels`` is of.
        within: the budget without its margin.
        is_given: whether the choice was given, and not looked for.
        bucket_bytes: with which :func:`headroom.release_gradients` releases gradients, or
            would after a dry run; None if they are not released, or not any more.

    All others are those of :class:`headroom.fitting.report.Chosen`.
    """

    model: nn.Module
    optimizer: Any
    budget: int
    plan: Plan | None
    predicted_peak: int | None
    predicted_host: int | None = 0
    host_budget: int | None = None
    blocks: list[str] = field(default_factory=list)
    within: int = 0
    is_given: bool = False
    bucket_bytes: int | None = None
    _step: Step | None = None  # which is run, and whose batch parts are compared with
    _applied: Applied | None = None
    _counts: Sequence[int] = ()  # of the micro-batches that there can be
    _estimate: Callable[[Sequence[str]], Any] | None = None  # of other levels

    def __post_init__(self) -> None:
        self.first_choice = self.choice
        """The choice that :func:`headroom.fit` made or was given, which the changes are of."""
        self._measure_anew()

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
        assert self._step is not None
        each = self.micro_batches(batch)
        self._measured.step_began(batch)
        try:
            loss = train(self._step.but(rule=self.rule, batch=batch), each)
        except BaseException:
            self._measured.abandon()
            raise
        self._measured.step_ended()
        self._measured.pause()
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
    def measured_peak(self) -> int | None:
        """Returns the most bytes of the first two steps with the choice, or None before them."""
        return self._measured.peak

    @property
    def measured_host(self) -> int | None:
        """Returns the most bytes that the host arena held in these, or None."""
        return self._measured.host_peak

    @property
    def measured_seconds(self) -> float | None:
        """Returns the median time of the latest steps, from the third on, or None."""
        return self._measured.seconds

    @property
    def scaler(self) -> Any:
        """Returns the scaler that losses are scaled by, or None."""
        return None if self._step is None else self._step.scaler or None

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
        self._become(self.choice.but(levels=tuple(levels)))

    def reduce_memory(self) -> bool:
        """Sets the next leaner choice that a running training can take, between two steps: leaner
        levels, in a few strides, then more of the optimizer's state on the host, if a part of it is
        there and ``host_budget`` has room for all, and then more micro-batches. Returns whether
        there was one. Later steps are measured anew.

        There are more micro-batches only where the losses of parts add up to the loss of the batch.
        If nobody has compared them yet, the first call that comes so far does: without gradients,
        on a copy of the model with the same weights."""
        self._live()
        here = self._same_but_levels()
        now = next((p.peak for p in here if p.choice == self.choice), self.predicted_peak)
        if here and now is not None:
            most = now - max(1, (now - here[0].peak) // STRIDES)
            if below := [point for point in here if point.peak <= most]:
                self._take(below[-1])
                return True
        if self._page_more():
            return True
        more = [count for count in self._counts if count > self.choice.micro_batches]
        if self.choice.release or not more or not self._parts_agree():
            return False
        self._become(self.choice.but(micro_batches=more[0]))
        return True

    def _page_more(self) -> bool:
        """Moves more of the optimizer's state to the host, and returns whether any might go."""
        handle = self.optimizer.offload_handle if self.choice.offload else None
        if handle is None or self.host_budget is None:
            return False
        most = handle.host.bytes + handle.memory().resident
        if most > self.host_budget or not handle.reduce_memory():
            return False
        self._become(self.choice.but(state_budget=handle.budget))
        return True

    def _parts_agree(self) -> bool:
        """Returns whether the losses of parts of a batch add up; False if there is no memory to
        compare them. The model stays as it is."""
        if self.agree is None:
            assert self._step is not None
            reason, rule = NO_RULE, None
            try:
                # The levels that were chosen stay: they are what there is memory for.
                rule = rule_of(self._step, rules_of(self._step), has_levels=False)
            except Exception as error:
                if is_out_of_memory(error):
                    return False  # no answer: there may be memory the next time
                reason = f"parts of a batch cannot be compared with it: {error}"
            self.agree, self.rule = rule is not None, rule or self.rule
            self._step = self._step.but(batch=None)
            if rule is None:
                note = f"reduce_memory() makes no more micro-batches: {reason}"
                self.notes.append(note.partition("\n")[0])
        return self.agree

    def _become(self, choice: Choice) -> None:
        """Takes note of another choice, which later steps are made with: what was predicted and
        measured before is of the old one."""
        self.choice, self.plan = choice, None
        known: Any = next(
            (p for p in (*self.reachable, *self.frontier) if p.choice == choice), None
        )
        if known is None and self._estimate is not None:
            if choice.but(levels=()) == self.first_choice.but(levels=()):
                known = self._estimate(choice.levels)
        self.predicted_peak = None if known is None else known.peak
        self.predicted_host = None if known is None else known.host
        self.predicted_seconds = None if known is None else known.seconds
        self._measure_anew()

    def _measure_anew(self) -> None:
        step = self._step
        if step is not None and step.device is not None:
            self._measured = FirstSteps(
                self.model, self.optimizer, step.device, context=context_bytes(step.device)
            )

    def _same_but_levels(self) -> list[FrontierPoint]:
        """Returns all choices that differ from this one in their levels alone and that no other of
        these beats, by ascending peaks."""
        bare = self.choice.but(levels=())
        return [point for point in self.reachable if point.choice.but(levels=()) == bare]

    def _take(self, point: FrontierPoint) -> None:
        """Sets the levels of another choice, whose estimates are the predictions from then on."""
        self.set_levels(point.choice.levels)
        self.predicted_peak, self.predicted_seconds = point.peak, point.seconds
        self.predicted_host = point.host

    def undo(self) -> None:
        """Gives the model back what it had: levels, layers, the dtype of its weights, and
        gradients that stay. With weights in bfloat16, those that the optimizer has are those of
        the float32 run, bit for bit; buffers and other weights that were cast have lost bits.
        Frozen weights that were quantized are in their dtype again, with the numbers of their
        codes: copies of what they were would take the memory that was to be saved. The optimizer
        stays this one. A second call does nothing."""
        if self._applied is not None:
            self._applied.undo()
            self._applied = self.bucket_bytes = None

    # ---- the report -----------------------------------------------------------------------------

    @property
    def next_up(self) -> FrontierPoint | None:
        """Returns the next choice that is faster and takes more, or None."""
        peak, seconds = self.predicted_peak, self.predicted_seconds
        if peak is None or seconds is None:
            return None
        better = (p for p in self.frontier if p.seconds < (1 - SAME) * seconds and p.peak > peak)
        return next(better, None)

    @property
    def next_down(self) -> FrontierPoint | None:
        """Returns the next choice that takes less and is slower, or None."""
        peak = (1 - SAME) * (self.predicted_peak or 0)
        return next((point for point in reversed(self.frontier) if point.peak < peak), None)

    @property
    def is_applied(self) -> bool:
        """Returns whether the model is changed now."""
        return self._applied is not None

    def __str__(self) -> str:
        return report(self)

    __repr__ = __str__  # notebooks show it

    def to_json(self) -> dict[str, Any]:
        """Returns the report in what :mod:`json` writes."""
        return described(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a Fitted holds hooks and an optimizer of one process, and cannot be pickled: save "
            "model.state_dict() and optimizer.state_dict(), and to_json() for the report"
        )
