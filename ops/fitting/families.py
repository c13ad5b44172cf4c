"""What is measured and planned once for choices whose forward and backward pass is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import RNNBase

from ..amp.cast_model import cast_model
from ..checkpointing import RecomputeError
from ..patching.families import find_layers
from ..planning.api import made
from ..planning.result import Plan
from ..step.errors import PlanError
from ..step.out_of_memory import is_out_of_memory
from .blocks import Blocks, private_copy
from .candidates import setup_of
from .choice import Choice
from .measure import Measured, measure_blocks, seconds_at_leanest
from .micro_batches import parts, some_samples
from .optimizers import optimizer_seconds
from .outer import Outer
from .passes import PassTimes
from .releasing import bucket_of
from .replacing import is_headroom, state_bytes
from .rest import Outline, outline
from .scaled import outline_of_part, part_of
from .setting import Setting
from .shares import rule_of, rules_of
from .techniques import Techniques

__all__ = ["Families"]


class _Key(NamedTuple):
    micro_batches: int
    weights: str
    fused_loss: bool


@dataclass
class _Family:
    """What choices have in common that differ in the optimizer and the release alone."""

    measured: Measured
    outline: Outline
    choice: Choice  # that the plan of the outline is of
    is_planned: bool = True  # or else only estimated


class Families:
    """Measures and plans, each thing when it is asked for the first time.

    Attributes:
        techniques: what can be chosen, and for what.
        names: of the blocks, in the order of the forward pass.
        notes: why some choices cannot be.
        agree: what :meth:`parts_agree` has found, or None.
        rule: what the loss is a mean over; see :mod:`headroom.fitting.shares`.
    """

    def __init__(self, techniques: Techniques) -> None:
        self.techniques, self.setting = techniques, techniques.setting
        self.names: list[str] = []
        self.notes: list[str] = []
        self._measured: dict[str, Measured] = {}  # by weights
        self._families: dict[_Key, _Family | None] = {}
        self._outlines: dict[Choice, Outline] = {}
        self._given_state: int | None = None
        self.agree: bool | None = True if techniques.parts_add_up else None
        self._rules = rules_of(self.setting)
        self.rule = self._rules[0]
        self._times: dict[str, PassTimes] = {}  # by weights
        self._steps: dict[tuple[str, str], float] = {}

    def outers(self, micro_batches: int) -> Iterator[Outer]:
        """Yields the choices with this number of micro-batches, with estimates.

        Raises:
            PlanError: the model as it is cannot be planned.
        """
        for choice in self.techniques.choices(micro_batches):
            family = self._family(_key(choice))
            if family is not None:
                yield self._outer(family, choice)

    def plan(self, choice: Choice, outer: Outer) -> Plan:
        """Plans a choice with its levels, and tells ``outer`` what that says of its bytes.

        Raises:
            PlanError: the step cannot be followed, or raises.
        """
        if choice not in self._outlines:
            optimizer = self.techniques.optimizer_of(choice)
            self._outlines[choice] = self._outlined(choice, optimizer, outer.measured)
        family = self._families[_key(choice)]
        if family is not None and not family.is_planned:  # the others are estimated from this one
            family.outline, family.choice = self._outlines[choice], choice
            family.is_planned = True
        outer.planned(self._outlines[choice], choice.levels)
        return self._outlines[choice].plan

    def planned_with(
        self, choice: Choice, optimizer: torch.optim.Optimizer, samples: int | None = None
    ) -> Plan:
        """Plans a choice with any optimizer. Without levels all blocks are at their leanest.

        Args:
            samples: so many of the batch; None: all.

        Raises:
            PlanError: the step cannot be followed, or raises.
        """
        setting = self.setting
        if samples is not None:
            setting = setting.but(batch=some_samples(setting.batch, samples))
        choice = choice.but(levels=choice.levels or self._leanest())
        return made(setup_of(setting, choice, self.names, optimizer, self._max_grad_norm))

    @property
    def _max_grad_norm(self) -> float | None:
        return self.techniques.max_grad_norm

    def time(self, outer: Outer) -> None:
        """Measures the seconds of parts of this size, with this loss. Parts are timed with a loss
        that was not timed yet, so that one pass says of both."""
        key = _key(outer.choice)
        times = self._times[key.weights]
        if times.is_known(key.micro_batches, key.fused_loss):
            return
        unknown = (f for f in self.techniques.fused_losses if not times.is_known(1, f))
        if key.micro_batches > 1 and (fused := next(unknown, None)) is not None:
            fused_too = key._replace(fused_loss=fused)
            key = key if self._family(fused_too) is None else fused_too
        expected = times.most_of_blocks(key.micro_batches)
        seconds = seconds_at_leanest(self._setting_of(key), expected)
        times.add(key.micro_batches, key.fused_loss, seconds)

    def parts_agree(self) -> bool:
        """Returns whether gradients of parts add up to that of the batch, and sets the rule by
        which they do; they do not where samples are compared with one another. If there are no
        parts, nothing is compared."""
        counts = [count for count in self.techniques.micro_batches if count > 1]
        if not counts:
            return True
        if self.agree is None:
            found = rule_of(self.setting, self._rules)
            self.agree, self.rule = found is not None, found or self.rule
        return self.agree

    @property
    def swaps_layers(self) -> bool:
        """Whether setting levels makes layers of transformers Headroom's."""
        return bool(self.names) and find_layers(self.setting.model) is not None

    # ---- families -------------------------------------------------------------------------------

    def _family(self, key: _Key) -> _Family | None:
        if key not in self._families:
            try:
                self._families[key] = self._made(key)
            except PlanError as error:
                if key == self._plain:
                    raise
                self._families[key] = None
                self._note(key, error)
            except RuntimeError as error:
                if key.weights == "given" or is_out_of_memory(error):
                    raise
                self._families[key] = None
                what = "the model does not run"
                if isinstance(error, RecomputeError):
                    what = "blocks cannot be run again"
                reason = f"{what} with weights in bfloat16: {error}"
                self._note(key, reason.partition("\n")[0])
        return self._families[key]

    @property
    def _plain(self) -> _Key:
        """What is nearest to the model as it was given."""
        return _Key(1, "given", self.techniques.fused_losses[0])

    def _made(self, key: _Key) -> _Family | None:
        if key.micro_batches > 1:
            return self._part(key)
        if key.weights not in self._measured:
            own = key._replace(fused_loss=self.techniques.fused_losses[0])
            measured = self._measured[key.weights] = self._measure(own)
            self._times[key.weights] = PassTimes(measured.whole, own.fused_loss)
            self.names = [block.name for block in measured.blocks]
            self._note_recurrent_layers()
        measured = self._measured[key.weights]
        if key.fused_loss != self.techniques.fused_losses[0]:
            return self._fused(key)
        same = (kind for kind, weights in self.techniques.optimizers if weights == key.weights)
        # Gradients stay in it, also where the loop wants them released: the estimates say what
        # that changes.
        choice = Choice(self._leanest(), 1, next(same), key.weights, False, key.fused_loss)
        optimizer = self.techniques.optimizer_of(choice)
        return _Family(measured, self._outlined(choice, optimizer, measured, steps=1), choice)

    def _measure(self, key: _Key) -> Measured:
        """Measures the blocks. Where the model does not run with its blocks at their leanest, such
        as one that writes to the argument of a block after the block has run, or where they compute
        something else when they run again, it has none. Once it has been measured with levels, all
        choices have them."""
        try:
            return measure_blocks(self._setting_of(key))
        except RuntimeError as error:
            if self._measured or is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        self.setting = self.setting.but(has_levels=False)
        measured = measure_blocks(self._setting_of(key))  # raises if the model itself does
        self.notes.append(f"levels: blocks cannot be run again: {reason}")
        return measured

    def _fused(self, key: _Key) -> _Family | None:
        """The fused loss, of which much is hoped until it is planned."""
        plain = self._family(key._replace(fused_loss=self.techniques.fused_losses[0]))
        if plain is None:
            return None
        found = replace(plain.outline, after_forward=0, after_backward=0)
        choice = plain.choice.but(fused_loss=True)
        return _Family(plain.measured, found, choice, is_planned=False)

    def _part(self, key: _Key) -> _Family | None:
        """Micro-batches, whose bytes are those of the batch divided until they are planned."""
        whole = self._family(key._replace(micro_batches=1))
        if whole is None:
            return None
        gradients = whole.outline.plan.timeline.most_by_kind["gradients"]
        return _Family(
            part_of(whole.measured, key.micro_batches),
            outline_of_part(whole.outline, key.micro_batches, gradients),
            whole.choice,
            is_planned=False,
        )

    def _outlined(
        self, choice: Choice, optimizer: Any, measured: Measured, steps: int = 2
    ) -> Outline:
        """The outline of a plan of so many steps: one for estimates, two for what is chosen."""
        setup = setup_of(self.setting, choice, self.names, optimizer, self._max_grad_norm)
        setup = setup.but(steps=steps)
        kept = sum(block.levels[level].kept for block, level in zip(measured.blocks, choice.levels))
        return outline(setup, self.names, kept)

    def _setting_of(self, key: _Key) -> Setting:
        """The setting that is measured: of a part of the batch, and of weights in 16 bits."""
        setting = self.setting.but(
            batch=parts(self.setting.batch, key.micro_batches)[0], fused_loss=key.fused_loss
        )
        if key.weights == "given":
            return setting
        return setting.but(model=cast_model(private_copy(setting.model), torch.bfloat16))

    def _leanest(self) -> tuple[str, ...]:
        measured = next(iter(self._measured.values()))
        return tuple(name for _, name in self._at_leanest(measured))

    def _at_leanest(self, measured: Measured) -> Iterator[tuple[Any, str]]:
        leanest = Blocks(self.setting.model).leanest
        return ((block, leanest[block.name]) for block in measured.blocks)

    def _note(self, key: _Key, error: Exception | str) -> None:
        what = [f"{key.micro_batches} micro-batches"] if key.micro_batches > 1 else []
        what += ["bf16"] if key.weights == "bf16" else []
        what += ["the fused loss"] if key.fused_loss else []
        self.notes.append(f"{' with '.join(what)}: {error}")

    def _note_recurrent_layers(self) -> None:
        """Warns of layers whose kernels for a GPU allocate what no plan sees."""
        found = {type(m).__name__ for m in self.setting.model.modules() if isinstance(m, RNNBase)}
        note = (
            f"{', '.join(sorted(found))}: what cuDNN takes for recurrent layers is in no plan, so "
            "the peak may be above the budget: look at the measured one"
        )
        if found and self.setting.device.type == "cuda" and note not in self.notes:
            self.notes.append(note)

    # ---- estimates ------------------------------------------------------------------------------

    def _outer(self, family: _Family, choice: Choice) -> Outer:
        count, weights, fused_loss = _key(choice)
        times, measured = self._times[weights], self._measured[weights]
        factor = times.factor(count)
        between = measured.seconds_of_rest - measured.whole.rest  # the blocks
        seconds = times.rest(count, fused_loss) + factor * between + self._step_seconds(choice)
        found = family.outline
        if choice != family.choice.but(levels=()):
            found = self._estimated(family, choice)
        is_timed = times.is_known(count, fused_loss)
        return Outer(choice, family.measured, found, seconds, factor, is_timed)

    def _step_seconds(self, choice: Choice) -> float:
        key = choice.optimizer, choice.weights
        if key not in self._steps:
            optimizer = self.techniques.optimizers[key]
            params = [p for group in optimizer.param_groups for p in group["params"]]
            dtype = torch.bfloat16 if choice.weights == "bf16" else None
            self._steps[key] = optimizer_seconds(
                optimizer, params, self.setting.device, dtype=dtype
            )
        return self._steps[key]

    def _state_of(self, optimizer: Any) -> int:
        """The bytes of an optimizer's state. Headroom's say what they will have, but for what they
        keep beside weights in 16 bits while these are in 32; of others a plan says it."""
        if is_headroom(optimizer):
            return state_bytes(optimizer, self._unused)
        family = self._families[self._plain]
        assert family is not None
        if self._given_state is None:
            kinds = family.outline.standing
            self._given_state = kinds["optimizer_state"] + kinds["master_weights"]
        return self._given_state

    @cached_property
    def _unused(self) -> list[nn.Parameter]:
        """The parameters that get no gradient in the first plan. There are none unless their bytes
        are all that the gradients in it lack."""
        family = self._families.get(self._plain)
        if family is None:  # the loop takes other weights only
            return []
        timeline = family.outline.plan.timeline
        trained = {n: p for n, p in self.setting.model.named_parameters() if p.requires_grad}
        lacking = sum(p.nbytes for p in trained.values()) - timeline.most_by_kind["gradients"]
        found = {a.op for a in timeline.allocations if a.kind == "gradients"}
        unused = [param for name, param in trained.items() if name not in found]
        return unused if sum(p.nbytes for p in unused) == lacking else []

    def _estimated(self, family: _Family, choice: Choice) -> Outline:
        """The outline with another optimizer than that of the family's plan, or with release."""
        reference = self.techniques.optimizer_of(family.choice)
        optimizer = self.techniques.optimizer_of(choice)
        found = family.outline
        kinds = found.standing
        of_plan = kinds["optimizer_state"] + kinds["master_weights"]
        state = of_plan
        if optimizer is not reference:
            state = self._state_of(optimizer) + max(0, of_plan - self._state_of(reference))
        floor = found.floor
        if optimizer is not reference or choice.release:
            standing = sum(kinds[kind] for kind in ("parameters", "buffers", "batch"))
            gradients = 0 if choice.release else found.plan.timeline.most_by_kind["gradients"]
            floor = standing + state + gradients
        base = found.base + state - of_plan
        gradients = bucket_of(self.setting.model, choice) if choice.release else found.gradients
        after = found.after_backward
        if choice.release and not self.names:  # then it is all of the backward pass
            after = max(0, after - found.plan.timeline.most_by_kind["gradients"])
        return replace(
            found, base=max(0, base), after_backward=after, gradients=gradients, floor=floor
        )


def _key(choice: Choice) -> _Key:
    return _Key(choice.micro_batches, choice.weights, choice.fused_loss)
