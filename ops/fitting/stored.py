"""Takes a choice that was made before, such as by the run that is resumed, and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from .._core.sizes import format_bytes
from ..planning.api import made
from ..planning.recorder import Recorder
from ..planning.result import Plan
from .blocks import Blocks
from .candidates import setup_of
from .choice import Choice
from .errors import DoesNotFit
from .families import Families
from .search import Found

__all__ = ["Stored"]


class Stored:
    """Plans a choice that was made before, and says whether it fits. The seconds of what it returns
    are 0, since nothing is measured.

    Args:
        families: of the model, which stay as they are: a ladder may be theirs too.
        choice: that was made.

    Raises:
        ValueError: it is none of the choices for this model, its optimizer and this batch.
    """

    def __init__(self, families: Families, choice: Choice) -> None:
        self._families, self._choice = families, choice
        self._found: dict[Choice, Found] = {}
        self._check(choice)

    def best(self, budget: int) -> Found:
        """Returns the choice with its plan.

        Raises:
            DoesNotFit: the plan is above ``budget`` bytes.
            PlanError: it cannot be planned.
        """
        found = self.priced(self._choice)
        plan = found.plan
        if plan.total_bytes > budget:
            raise DoesNotFit(
                f"the choice that was given ({self._choice}) takes "
                f"{format_bytes(plan.total_bytes)}, and the budget leaves {format_bytes(budget)} "
                "besides its margin: give a larger budget, or leave choice out to look for another",
                plan.total_bytes,
                plan.peak_by_kind,
            )
        return found

    def priced(self, choice: Choice) -> Found:
        """Returns a choice, whoever made it, with its plan.

        Raises:
            ValueError: it is none of the choices for this model, its optimizer and this batch.
            PlanError: it cannot be planned.
        """
        if choice not in self._found:
            self._check(choice)
            plan, names = self._planned(choice)
            self._found[choice] = Found(choice, plan, 0.0, names)
        return self._found[choice]

    def _check(self, choice: Choice) -> None:
        techniques = self._families.techniques
        reason = techniques.obstacle(choice)
        if reason is not None:
            raise ValueError(f"choice {reason}")
        if choice.micro_batches > 1 and not self._families.parts_agree():
            raise ValueError(
                f"choice has {choice.micro_batches} micro-batches, whose gradients do not add up "
                "to that of the batch"
            )

    def _planned(self, choice: Choice) -> tuple[Plan, tuple[str, ...]]:
        """The plan, and the names of the blocks that have levels. Levels are those of the blocks in
        the order in which a step calls them, which is that of their names until the step says
        something else."""
        names = Blocks(self._families.setting.model).names if choice.levels else []
        while True:
            has_levels = len(names) == len(choice.levels)
            plan, called = self._traced(choice if has_levels else choice.but(levels=()), names)
            if has_levels and called == names:
                return plan, tuple(names)
            if called == names:
                raise ValueError(
                    f"choice has {len(choice.levels)} levels, wanted {len(names)}, one for each "
                    "block that a step calls"
                )
            names = called

    def _traced(self, choice: Choice, names: Sequence[str]) -> tuple[Plan, list[str]]:
        """The plan, and the names of the blocks in the order of their first calls."""
        own, called = self._families.techniques, {}
        setup = setup_of(own.setting, choice, names, own.optimizer_of(choice), own.max_grad_norm)
        return made(setup, partial(_watch, names, called)), list(called)


def _watch(names: Sequence[str], called: dict[str, None], model: nn.Module, _: Recorder) -> None:
    """Notes the blocks of a model when they are called."""

    def note(name: str) -> Any:
        return lambda block, args: called.setdefault(name)

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(note(name))
