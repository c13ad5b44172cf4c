"""What is measured and planned once for choices whose forward and backward pass is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..amp.cast_model import cast_model
from ..memory.events import Timeline
from ..patching.families import find_layers
from ..planning.api import made
from ..planning.errors import PlanError
from ..planning.result import Plan
from .blocks import Blocks, private_copy
from .candidates import setup_of
from .generators import all_generators_kept
from .measure import Measured, measure_blocks, seconds_at_leanest
from .micro_batches import parts
from .optimizers import optimizer_seconds
from .outer import Outer
from .replacing import is_headroom, state_bytes
from .rest import Outline, outline
from .scaled import outline_of_part, part_of
from .setting import Setting
from .techniques import Choice, Techniques

__all__ = ["Families"]

FASTER = 0.95  # of the time of a whole batch: parts that take more are not taken to be faster


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
    is_timed: bool = True
    is_planned: bool = True  # or else only estimated


class Families:
    """Measures and plans, each thing when it is asked for the first time.

    Attributes:
        names: of the blocks, in the order of the forward pass.
        notes: why some choices cannot be.
    """

    def __init__(
        self, setting: Setting, techniques: Techniques, max_grad_norm: float | None = None
    ) -> None:
        self.setting, self.techniques = setting, techniques
        self.max_grad_norm = max_grad_norm
        self.names: list[str] = []
        self.notes: list[str] = []
        self._measured: dict[str, Measured] = {}  # by weights
        self._families: dict[_Key, _Family | None] = {}
        self._outlines: dict[Choice, Outline] = {}
        self._given_state: int | None = None
        self._agree: bool | None = None
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

    def planned_leanest(self, choice: Choice, optimizer: torch.optim.Optimizer) -> Plan:
        """Plans a choice with all blocks at their leanest levels, and any optimizer."""
        choice = choice.but(levels=self._leanest())
        return made(setup_of(self.setting, choice, self.names, optimizer, self.max_grad_norm))

    def time(self, outer: Outer) -> None:
        """Measures the seconds of parts of this size."""
        key = _key(outer.choice)
        family = self._families[key]
        if family is None or family.is_timed:
            return
        whole = self._measured[key.weights]
        seconds = seconds_at_leanest(self._setting_of(key))
        blocks = sum(block.levels[name].seconds for block, name in self._at_leanest(whole))
        if key.micro_batches == 1:  # another loss: what is not of the blocks
            family.measured = replace(whole, seconds_of_rest=max(0.0, seconds - blocks))
        else:
            expected = (blocks + whole.seconds_of_rest) / key.micro_batches
            factor = seconds / max(expected, 1e-9)
            if FASTER < factor < 1.0:
                factor = 1.0
            family.measured = part_of(whole, key.micro_batches, factor)
        family.is_timed = True

    def parts_agree(self) -> bool:
        """Returns whether the loss of the batch is the mean of the losses of its parts, in
        evaluation mode; it is not if it is a sum, or compares samples with one another. A loop that
        names its numbers of micro-batches weights their losses itself."""
        if "micro_batches" in self.techniques.only:
            return True
        if self._agree is None:
            count = self.techniques.micro_batches[1]
            model = private_copy(self.setting.model).eval()
            with all_generators_kept(self.setting.device), torch.no_grad():
                whole, *each = (
                    self.setting.run(model, part, trains=False).double()
                    for part in (self.setting.batch, *parts(self.setting.batch, count))
                )
            low = self.setting.amp is not None or whole.dtype != torch.float32
            error = (sum(each) / count - whole).abs()
            self._agree = bool(error <= (1e-2 if low else 1e-3) * whole.abs() + 1e-6)
        return self._agree

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
            measured = self._measured[key.weights] = measure_blocks(self._setting_of(own))
            self.names = [block.name for block in measured.blocks]
        measured = self._measured[key.weights]
        if key.fused_loss != self.techniques.fused_losses[0]:
            return self._fused(key)
        same = (c for c in self.techniques.choices() if _key(c) == key)
        choice = next(same).but(levels=self._leanest())
        found = self._outlined(choice, self.techniques.optimizer_of(choice), measured)
        self._outlines[choice] = found
        return _Family(measured, found, choice)

    def _fused(self, key: _Key) -> _Family | None:
        """The fused loss, of which much is hoped until it is planned and timed."""
        plain = self._family(key._replace(fused_loss=self.techniques.fused_losses[0]))
        if plain is None:
            return None
        found = replace(plain.outline, after_forward=0, after_backward=0)
        return _Family(plain.measured, found, plain.choice.but(fused_loss=True), False, False)

    def _part(self, key: _Key) -> _Family | None:
        """Micro-batches, whose costs are those of the batch divided until they are timed."""
        whole = self._family(key._replace(micro_batches=1))
        if whole is None:
            return None
        gradients = whole.outline.plan.timeline.most_by_kind["gradients"]
        return _Family(
            part_of(whole.measured, key.micro_batches),
            outline_of_part(whole.outline, key.micro_batches, gradients),
            whole.choice,
            False,
            False,
        )

    def _outlined(self, choice: Choice, optimizer: Any, measured: Measured) -> Outline:
        setup = setup_of(self.setting, choice, self.names, optimizer, self.max_grad_norm)
        if not self.names:  # then the plan is all that there is to know
            plan = made(setup)
            return Outline(plan, 0, 0, 0, 0, plan.peak_bytes)
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

    def _note(self, key: _Key, error: Exception) -> None:
        what = [f"{key.micro_batches} micro-batches"] if key.micro_batches > 1 else []
        what += ["bf16"] if key.weights == "bf16" else []
        what += ["the fused loss"] if key.fused_loss else []
        self.notes.append(f"{' with '.join(what)}: {error}")

    # ---- estimates ------------------------------------------------------------------------------

    def _outer(self, family: _Family, choice: Choice) -> Outer:
        rest = choice.micro_batches * family.measured.seconds_of_rest
        found = family.outline
        if choice != family.choice.but(levels=()):
            found = self._estimated(family, choice)
        seconds = rest + self._step_seconds(choice)
        return Outer(choice, family.measured, found, seconds, family.is_timed)

    def _step_seconds(self, choice: Choice) -> float:
        key = choice.optimizer, choice.weights
        if key not in self._steps:
            optimizer = self.techniques.optimizers[key]
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self._steps[key] = optimizer_seconds(optimizer, params, self.setting.device)
        return self._steps[key]

    def _state_of(self, optimizer: Any) -> int:
        """The bytes of an optimizer's state. Headroom's say what they will have, but for what they
        keep beside weights in 16 bits while these are in 32; of others a plan says it."""
        if is_headroom(optimizer):
            return state_bytes(optimizer)
        family = self._families[self._plain]
        assert family is not None
        if self._given_state is None:
            kinds = _standing(family.outline.plan.timeline)
            self._given_state = kinds["optimizer_state"] + kinds["master_weights"]
        return self._given_state

    def _estimated(self, family: _Family, choice: Choice) -> Outline:
        """The outline with another optimizer than that of the family's plan, or with release."""
        reference = self.techniques.optimizer_of(family.choice)
        optimizer = self.techniques.optimizer_of(choice)
        found = family.outline
        timeline = found.plan.timeline
        kinds = _standing(timeline)
        of_plan = kinds["optimizer_state"] + kinds["master_weights"]
        state = of_plan
        if optimizer is not reference:
            state = self._state_of(optimizer) + max(0, of_plan - self._state_of(reference))
        floor = found.floor
        if optimizer is not reference or choice.release:
            standing = sum(kinds[kind] for kind in ("parameters", "buffers", "batch"))
            gradients = 0 if choice.release else timeline.most_by_kind["gradients"]
            floor = standing + state + gradients
        base = found.base + state - of_plan
        gradients = 0 if choice.release else found.gradients
        return replace(found, base=max(0, base), gradients=gradients, floor=floor)


def _standing(timeline: Timeline) -> dict[str, int]:
    """The bytes of each kind when the last forward pass begins."""
    return timeline.by_kind(max(s.start for s in timeline.spans if s.phase == "forward"))


def _key(choice: Choice) -> _Key:
    return _Key(choice.micro_batches, choice.weights, choice.fused_loss)
