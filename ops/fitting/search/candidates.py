"""Makes the candidates: measures and plans once what several of them share."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._core.module_copies import copied_modules, private_copy
from ...checkpointing import RecomputeError
from ...host.engines import engine_of
from ...host.schedule import measured_link
from ...nn.steps import LEVELS_IN_8_BITS
from ...param_states.paging import PagingMemory, paged_seconds, planned_paging
from ...patching.levels import Blocks
from ...patching.patch import repeated_layers
from ...planning.advice import advise
from ...planning.api import plan_of
from ...planning.checks import check_step
from ...planning.recorder import Recorder
from ...planning.result import Plan
from ...release import bucket_of
from ...step.description import Step
from ...step.errors import PlanError
from ...step.micro_batches import some_samples
from ...step.optimizers import is_headroom, state_bytes
from ...step.out_of_memory import is_out_of_memory
from ...step.rules import NO_RULE, rule_of, rules_of
from ...techniques import TECHNIQUES
from ...techniques.technique import Target
from ..choice import Choice
from ..costs.block_costs import Measured
from ..costs.measure import measure_blocks, seconds_at_leanest
from ..costs.on_host import Streamed, hosted_seconds, streamed
from ..costs.optimizer_seconds import optimizer_seconds
from ..costs.outline import Outline, outline
from ..costs.passes import PassTimes
from .candidate import Candidate, Found, Frontiers
from .techniques import Techniques

HOST = torch.device("cpu")
AS_GIVEN = "given", "given", ()  # of _Pass.tensors


class _Pass(NamedTuple):
    """The fields of a choice that decide its forward and its backward pass, besides the levels."""

    micro_batches: int
    weights: str
    frozen: str
    fused_loss: bool
    others: tuple[tuple[str, Any], ...] = ()

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Returns what decides the model that is measured."""
        return self.weights, self.frozen, self.others

    @property
    def choice(self) -> Choice:
        """Returns the choice of such a pass that differs the least from the model as it is."""
        return Choice(**self._asdict())


@dataclass(frozen=True)
class _PassCosts:
    """The costs that choices share which differ in the optimizer and the release alone.

    Attributes:
        choice: that the plan of the outline is of.
        is_planned: whether the outline is of such a pass, or only estimated.
    """

    measured: Measured
    outline: Outline
    choice: Choice
    is_planned: bool = True


class Candidates:
    """Makes candidates, and measures and plans for them, each thing when it is asked for the first
    time.

    Attributes:
        techniques: what can be chosen, and for what.
        names: of the blocks, in the order of the forward pass; none before they are measured.
        agree: what :meth:`parts_agree` has found, or None.
        rule: what the loss is a mean over; see :mod:`headroom.step.micro_batches`.
        host_room: bytes that may be on the host; None: as many as there are.
    """

    def __init__(self, techniques: Techniques, host_room: int | None = None) -> None:
        self.techniques, self.host_room = techniques, host_room
        self.names: list[str] = []
        self.agree: bool | None = True if techniques.parts_add_up else None
        self._rules = rules_of(techniques.step)
        self.rule = self._rules[0]
        self._notes: list[str] = []
        self._has_levels = True
        self._measured: dict[tuple[Any, ...], Measured] = {}  # by _Pass.tensors
        self._times: dict[tuple[Any, ...], PassTimes] = {}  # by _Pass.tensors
        self._passes: dict[_Pass, _PassCosts | None] = {}
        self._outlines: dict[Choice, Outline] = {}
        self._planned: dict[Choice, tuple[str, ...]] = {}  # the levels of the latest plan
        self._gone: set[Choice] = set()  # that cannot be planned
        self._step_seconds: dict[tuple[Any, ...], float] = {}
        self._paged: dict[tuple[str, str, int], PagingMemory] = {}
        self._states: dict[tuple[str, str], int] = {}
        self._streams: dict[tuple[_Pass, int], Streamed] = {}
        self._frontiers = Frontiers()

    def with_techniques(self, techniques: Techniques) -> Candidates:
        """Returns these candidates for another call, in which the optimizers and layers of
        ``techniques``, and what they allow, take the place of those that were given and made
        before: what was measured and planned holds for them too, and is shared.

        Args:
            techniques: of the same model and so on, with as many optimizers to choose from.
        """
        found = copy.copy(self)
        found.techniques = replace(
            self.techniques,
            step=techniques.step,
            optimizers=techniques.optimizers,
            layers=techniques.layers,
            allowed=techniques.allowed,
        )
        found._notes, found._gone = [*self._notes], {*self._gone}
        return found

    @property
    def step(self) -> Step:
        """Returns the step that candidates are for."""
        return self.techniques.step

    @property
    def notes(self) -> list[str]:
        """Returns why some choices cannot be."""
        return [*self.techniques.notes, *self._notes]

    @property
    def plans(self) -> dict[Choice, Plan]:
        """Returns the plans of choices with their levels."""
        return {choice: self._plan(choice) for choice in self._outlines}

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self._notes:
            self._notes.append(text)

    def every(self, formats: Collection[str]) -> Iterator[Candidate]:
        """Yields the candidates as far as they are known, those of whole batches first.

        Args:
            formats: of frozen weights, which are looked at.

        Raises:
            PlanError: the model as it is cannot be planned.
        """
        for choice in self.techniques.choices:
            if choice in self._gone or choice.frozen not in formats:
                continue
            costs = self._costs(_pass_of(choice))
            if costs is not None:
                yield self._candidate(costs, choice)

    def plan(self, choice: Choice) -> Plan:
        """Returns the plan of a choice with its levels, from which candidates are then made.

        Raises:
            PlanError: the step cannot be followed, or raises.
        """
        key = _pass_of(choice)
        costs = self._costs(key)
        if costs is None:
            raise PlanError(f"{choice} is none of the choices for this model")
        if choice not in self._outlines:
            optimizer = self.techniques.optimizer_of(choice)
            self._outlines[choice] = self._outlined(choice, optimizer, costs.measured)
        found = self._outlines[choice]
        if not (costs.is_planned or choice.weights_host):  # the others are estimated from this one
            self._passes[key] = _PassCosts(costs.measured, found, choice)
        self._planned[choice.but(levels=())] = choice.levels
        return self._plan(choice)

    def _plan(self, choice: Choice) -> Plan:
        """Returns the plan of an outline, which can be asked for advice."""

        def again(plan: Plan, top: int | None) -> Any:
            optimizer = self.techniques.optimizer_of(choice)
            return advise(self.step_with(choice, self.names, optimizer), plan, plan_of, top)

        return replace(self._outlines[choice].plan, _again=again)

    def leave_out(self, choice: Choice, error: Exception) -> None:
        """Leaves out a choice that cannot be planned, whatever its levels."""
        self._gone.add(choice.but(levels=()))
        self.note(str(error))

    def planned_with(
        self, choice: Choice, optimizer: torch.optim.Optimizer, samples: int | None = None
    ) -> Plan:
        """Returns the plan of a choice with any optimizer. Without levels all blocks are at the
        leanest that is allowed.

        Args:
            samples: so many of the batch; None: all.

        Raises:
            PlanError: the step cannot be followed, or raises.
        """
        step = self.step
        if samples is not None:
            step = step.but(batch=some_samples(step.batch, samples), part_of=None)
        choice = choice.but(levels=choice.levels or self._leanest(self.techniques.in_8_bits))
        return plan_of(self.step_with(choice, self.names, optimizer, step))

    def step_with(
        self,
        choice: Choice,
        names: Sequence[str],
        optimizer: torch.optim.Optimizer,
        step: Step | None = None,
    ) -> Step:
        """Returns the step with a choice, for :func:`headroom.plan`. The model stays as it is: its
        modules are copied, and their tensors shared, or, where they would be quantized, only their
        shapes.

        Args:
            names: of the blocks that ``choice.levels`` are for.
            optimizer: of the choice.
            step: of another batch; None: that of the candidates.
        """
        step = self.step if step is None else step
        for technique in TECHNIQUES:
            step = technique.on_step(step, choice, names)
        model = copied_modules(step.model, lambda x: x)
        step = check_step(step.but(model=model, optimizer=optimizer))
        target = Target(model, optimizer, names, self.techniques.layers)
        for technique in TECHNIQUES:
            if technique.is_used(choice):
                technique.on_copy(target, choice)
        return step

    def taken(self, choice: Choice) -> Found:
        """Returns a choice that was made elsewhere with its plan. Nothing is measured for it but
        whether the gradients of parts add up.

        Raises:
            ValueError: it is none of the choices for this model, its optimizer and this batch.
            PlanError: it cannot be planned.
        """
        if choice in self._outlines:
            return Found(choice, self._plan(choice), None, tuple(self.names))
        reason = self.techniques.obstacle(choice)
        if reason is not None:
            raise ValueError(f"choice {reason}")
        if choice.micro_batches > 1 and not self.parts_agree():
            raise ValueError(
                f"choice has {choice.micro_batches} micro-batches, whose gradients do not add up "
                "to that of the batch"
            )
        # Levels are those of the blocks in the order in which a step calls them, which is that of
        # their names until the step says something else.
        names = (self.names or Blocks(self.step.model).names) if choice.levels else []
        while True:
            has_levels = len(names) == len(choice.levels)
            plan, called = self._traced(choice if has_levels else choice.but(levels=()), names)
            if has_levels and called == names:
                return Found(choice, plan, None, tuple(names))
            if called == names:
                raise ValueError(
                    f"choice has {len(choice.levels)} levels, wanted {len(names)}, one for each "
                    "block that a step calls"
                )
            names = called

    def _traced(self, choice: Choice, names: Sequence[str]) -> tuple[Plan, list[str]]:
        """Returns the plan, and the names of the blocks in the order of their first calls."""
        called: dict[str, None] = {}
        step = self.step_with(choice, names, self.techniques.optimizer_of(choice))
        return plan_of(step, partial(_watch, names, called)), list(called)

    def time(self, choice: Choice) -> None:
        """Measures the seconds of parts of this size, with this loss. Parts are timed with a loss
        that was not timed yet, so that one pass says of both."""
        key = _pass_of(choice)
        times = self._times[key.tensors]
        if times.is_known(key.micro_batches, key.fused_loss):
            return
        unknown = (f for f in self.techniques.fused_losses if not times.is_known(1, f))
        if key.micro_batches > 1 and (fused := next(unknown, None)) is not None:
            fused_too = key._replace(fused_loss=fused)
            key = key if self._costs(fused_too) is None else fused_too
        count = key.micro_batches
        expected = times.whole.blocks / count * times.factor(count)
        seconds = seconds_at_leanest(self._step_of(key), expected, **self._blocks_of(key))
        times.add(key.micro_batches, key.fused_loss, seconds)

    def parts_agree(self) -> bool:
        """Returns whether gradients of parts add up to that of the batch, and sets the rule by
        which they do; they do not where samples are compared with one another: then there are no
        micro-batches to choose any more. If there were none, nothing is compared.

        Raises:
            ValueError: the loop takes only micro-batches.
        """
        if all(count == 1 for count in self.techniques.micro_batches):
            return self.agree is not False
        if self.agree is None:
            found = rule_of(self.step, self._rules, has_levels=self._has_levels)
            self.agree, self.rule = found is not None, found or self.rule
            if not self.agree:
                self.techniques = self.techniques.whole_batches(NO_RULE)
        return self.agree

    @property
    def swaps_layers(self) -> bool:
        """Returns whether setting levels makes layers of transformers, or experts, Headroom's."""
        return bool(self.names) and any(b.swaps for b in repeated_layers(self.step.model)[1])

    # ---- what passes cost -----------------------------------------------------------------------

    def _costs(self, key: _Pass) -> _PassCosts | None:
        if key not in self._passes:
            try:
                self._passes[key] = self._new_costs(key)
            except RuntimeError as error:
                reason = str(error)
                if not isinstance(error, PlanError):
                    if key.tensors == self._plain.tensors or is_out_of_memory(error):
                        raise
                    is_again = isinstance(error, RecomputeError)
                    what = "blocks cannot be run again" if is_again else "the model does not run"
                    how = Choice().but(frozen=key.frozen, weights=key.weights, others=key.others)
                    reason = f"{what} with {how}: {error}".partition("\n")[0]
                elif key == self._plain:
                    raise
                self._passes[key] = None
                self.note(f"{key.choice}: {reason}")
        return self._passes[key]

    @property
    def _plain(self) -> _Pass:
        """Returns what is nearest to the model as it was given."""
        techniques = self.techniques
        return _Pass(1, "given", techniques.formats[0], techniques.fused_losses[0])

    def _new_costs(self, key: _Pass) -> _PassCosts | None:
        own = self.techniques.fused_losses[0]
        if key.micro_batches > 1:  # whose bytes are the batch's, divided, until they are planned
            whole = self._costs(key._replace(micro_batches=1))
            if whole is None:
                return None
            measured = whole.measured.part(key.micro_batches)
            found = whole.outline.part(key.micro_batches)
            return _PassCosts(measured, found, whole.choice, is_planned=False)
        if key.fused_loss != own:  # of which much is hoped until it is planned
            plain = self._costs(key._replace(fused_loss=own))
            if plain is None:
                return None
            found = replace(plain.outline, after_forward=0, after_backward=0, evaluation=0)
            choice = plain.choice.but(fused_loss=True)
            return _PassCosts(plain.measured, found, choice, is_planned=False)
        measured = self._measured[key.tensors] = self._measure(key)
        self._times[key.tensors] = PassTimes(measured.whole, own)
        self.names = [block.name for block in measured.blocks]
        same = (kind for kind, weights in self.techniques.optimizers if weights == key.weights)
        # Gradients stay in it, also where the loop wants them released: the estimates say what
        # that changes.
        choice = Choice(self._leanest(), optimizer=next(same), **key._asdict())
        optimizer = self.techniques.optimizer_of(choice)
        found = self._outlined(choice, optimizer, measured, steps=1)
        for text in found.plan.timeline.notes:
            self.note(text)
        return _PassCosts(measured, found, choice)

    def _measure(self, key: _Pass) -> Measured:
        """Measures the blocks. Where the model does not run with its blocks at their leanest, such
        as one that writes to the argument of a block after the block has run, or where they compute
        something else when they run again, it has none. Once it has been measured with levels, all
        choices have them."""
        try:
            where = {"on_host": self.techniques.on_host, "in_8_bits": self.techniques.in_8_bits}
            return measure_blocks(self._step_of(key), **where, **self._blocks_of(key))
        except RuntimeError as error:
            if self._measured or is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        self._has_levels = False
        measured = measure_blocks(self._step_of(key), has_levels=False, fused_loss=key.fused_loss)
        self.note(f"levels: blocks cannot be run again: {reason}")
        return measured

    def _outlined(
        self, choice: Choice, optimizer: Any, measured: Measured, steps: int = 2
    ) -> Outline:
        """Returns the outline of a plan of so many steps: one for estimates, two for what is
        chosen."""
        step = self.step_with(choice, self.names, optimizer).but(steps=steps)
        kept = sum(block.levels[level].kept for block, level in zip(measured.blocks, choice.levels))
        return outline(step, self.names, kept)

    def _step_of(self, key: _Pass) -> Step:
        """Returns the step that is measured: of a part of the batch, and of weights in 16 bits, or
        frozen ones in few."""
        step, choice = self.step.but(batch=self.step.part(key.micro_batches)), key.choice
        if key.tensors == AS_GIVEN:
            return step
        step = step.but(model=private_copy(step.model))
        target = Target(step.model, step.optimizer, self.names, self.techniques.layers)
        for technique in TECHNIQUES:
            if technique.is_used(choice):
                technique.on_measured_copy(target, choice)
        return step

    def _blocks_of(self, key: _Pass) -> dict[str, bool]:
        return {"fused_loss": key.fused_loss, "has_levels": self._has_levels}

    def _leanest(self, in_8_bits: bool = False) -> tuple[str, ...]:
        leanest = Blocks(self.step.model).leanest
        levels = [leanest[name] for name in self.names]
        if in_8_bits:  # but the last block, whose input is wanted at once
            levels[:-1] = [LEVELS_IN_8_BITS.get(level, level) for level in levels[:-1]]
        return tuple(levels)

    # ---- estimates ------------------------------------------------------------------------------

    def _candidate(self, costs: _PassCosts, choice: Choice) -> Candidate:
        key = _pass_of(choice)
        count, fused_loss = key.micro_batches, key.fused_loss
        times, measured = self._times[key.tensors], self._measured[key.tensors]
        factor = times.factor(count)
        between = measured.seconds_of_rest - measured.whole.outside  # the blocks
        outside = times.outside(count, fused_loss)
        seconds = outside + factor * between + self._seconds_of_step(choice, measured)
        streamed = self.streamed(choice)
        planned = self._planned.get(choice)
        if planned is not None:
            found = self._outlines[choice.but(levels=planned)]
        elif choice == costs.choice.but(levels=()):
            found = costs.outline
        else:
            found = self._estimated(costs, choice, streamed)
        is_timed = times.is_known(count, fused_loss)
        return Candidate(
            choice, streamed.measured, found, seconds + count * streamed.seconds, factor, is_timed,
            planned, self._frontiers, self.paged(choice).host + streamed.host, self.host_room,
        )  # fmt: skip

    def streamed(self, choice: Choice) -> Streamed:
        """Returns what it changes that weights are on the host, for one micro-batch of a choice."""
        key = _pass_of(choice), choice.weights_host
        if key not in self._streams:
            costs = self._passes[key[0]]
            assert costs is not None
            count, measured = choice.weights_host, costs.measured
            self._streams[key] = Streamed(measured)
            if count:
                self._streams[key] = streamed(measured, count, measured_link(self.device))
        return self._streams[key]

    def _seconds_of_step(self, choice: Choice, measured: Measured) -> float:
        """Returns the seconds of the optimizer, and of what it waits for."""
        on_host = 0.0
        if self.is_beside and choice.weights_host:
            on_host = self.streamed(choice).gradients / self._gradients_of(choice)
        if not on_host:
            return self._seconds_on_device(choice, measured)
        # The weights that are on the host are stepped there.
        seconds = (1 - on_host) * self._seconds_on_device(choice, measured)
        return seconds + on_host * self._timed_step(choice, HOST)

    def _seconds_on_device(self, choice: Choice, measured: Measured) -> float:
        device = self.device
        if choice.offload == "step" and self.is_beside:
            link, seconds = measured_link(device), self._timed_step(choice, HOST)
            gradients = self._gradients_of(choice)
            return hosted_seconds(measured.blocks, gradients, seconds, link, choice.release)
        resident = self._timed_step(choice, device)
        if not choice.offload:
            return resident
        memory = self.paged(choice)
        if self.is_beside:
            return paged_seconds(memory, resident, device)
        share = memory.host / max(1, memory.host + memory.resident)
        return resident + share * max(0.0, self._timed_step(choice, device, True) - resident)

    def _timed_step(self, choice: Choice, device: torch.device, offload: bool = False) -> float:
        key = choice.optimizer, choice.weights, device, offload
        if key not in self._step_seconds:
            optimizer = self.techniques.optimizer_of(choice)
            seconds = optimizer_seconds(optimizer, device, dtype=choice.dtype, offload=offload)
            self._step_seconds[key] = seconds
        return self._step_seconds[key]

    @property
    def device(self) -> torch.device:
        """Returns the device of the step."""
        assert self.step.device is not None
        return self.step.device

    def _gradients_of(self, choice: Choice) -> int:
        """Returns the bytes of all gradients, which have the dtypes of the weights."""
        trained = (p for p in self.step.model.parameters() if p.requires_grad)
        return sum(p.numel() * (choice.dtype or p.dtype).itemsize for p in trained) or 1

    @property
    def is_beside(self) -> bool:
        """Returns whether copies run beside what the device computes."""
        return engine_of(self.device).is_asynchronous

    def paged(self, choice: Choice) -> PagingMemory:
        """Returns the bytes of the state of a choice's optimizer, by where they are, if it is on
        the host; else none."""
        optimizer = self.techniques.optimizer_of(choice)
        paging = getattr(optimizer, "_paging", None)  # of the user
        if paging is None and not choice.offload:
            return PagingMemory(0, 0, 0)
        budget, bucket = (choice.state_budget, None)
        if paging is not None:
            budget, bucket = paging.budget or 0, paging.bucket_bytes
        key = choice.optimizer, choice.weights, budget
        if key not in self._paged:
            self._paged[key] = planned_paging(optimizer, budget, bucket)
        return self._paged[key]

    def _state_of(self, choice: Choice) -> int:
        """Returns the bytes of the state of a choice's optimizer. They are computed for Headroom's,
        but for what these keep beside weights in 16 bits while the weights are in 32; of others a
        plan says it."""
        key = choice.optimizer, choice.weights
        if key not in self._states:
            optimizer = self.techniques.optimizers[key]
            if is_headroom(optimizer):
                self._states[key] = state_bytes(optimizer, self._unused)
            else:
                plain = self._passes[self._plain]
                assert plain is not None
                kinds = plain.outline.standing
                self._states[key] = kinds["optimizer_state"] + kinds["master_weights"]
        return self._states[key]

    @cached_property
    def _unused(self) -> list[nn.Parameter]:
        """Returns the parameters that get no gradient in the first plan. There are none unless
        their bytes are all that the gradients in it lack."""
        plain = self._passes.get(self._plain)
        if plain is None:  # the loop takes other weights only
            return []
        trained = {n: p for n, p in self.step.model.named_parameters() if p.requires_grad}
        lacking = sum(p.nbytes for p in trained.values()) - plain.outline.all_gradients
        allocations = plain.outline.plan.timeline.allocations
        found = {a.op for a in allocations if a.kind == "gradients"}
        unused = [param for name, param in trained.items() if name not in found]
        return unused if sum(p.nbytes for p in unused) == lacking else []

    def _estimated(self, costs: _PassCosts, choice: Choice, streamed: Streamed) -> Outline:
        """Returns the outline with another optimizer than that of the plan, or with release."""
        found = costs.outline
        kinds = found.standing
        of_plan = kinds["optimizer_state"] + kinds["master_weights"]
        is_same = _of_optimizer(choice) == _of_optimizer(costs.choice)
        state = of_plan
        if choice.offload:
            memory = self.paged(choice)
            state = memory.resident + memory.ring
        elif not is_same:
            state = self._state_of(choice) + max(0, of_plan - self._state_of(costs.choice))
        floor, after, waiting = found.floor, found.after_backward, found.gradients
        if choice.release:
            waiting = bucket_of(self.step.model, choice.dtype)
            if not self.names:  # then it is all of the backward pass
                after = max(0, after - found.all_gradients)
        if not is_same or choice.release:
            standing = sum(kinds[kind] for kind in ("parameters", "buffers", "batch"))
            floor = standing + state + (0 if choice.release else found.all_gradients)
        stay = choice.micro_batches > 1  # gradients, which the first forward pass finds then
        base = max(0, found.base + state - of_plan + streamed.device - stay * streamed.gradients)
        floor = max(0, floor + streamed.device - (not choice.release) * streamed.gradients)
        evaluation = found.evaluation and found.evaluation + state - of_plan + streamed.device
        return replace(
            found, base=base, after_backward=after, gradients=waiting, floor=floor,
            evaluation=max(0, evaluation),
        )  # fmt: skip


def _of_optimizer(choice: Choice) -> tuple[Any, ...]:
    return choice.optimizer, choice.weights, choice.offload, choice.state_budget


def _pass_of(choice: Choice) -> _Pass:
    return _Pass(*(getattr(choice, name) for name in _Pass._fields))


def _watch(names: Sequence[str], called: dict[str, None], model: nn.Module, _: Recorder) -> None:
    """Notes the blocks of a model when they are called."""

    def note(name: str) -> Any:
        return lambda block, args: called.setdefault(name)

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(note(name))
