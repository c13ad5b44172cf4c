"""Save levels: what blocks keep for the backward pass, and what they compute again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from .._core.module_copies import copied_modules
from ..nn.block import Block
from ..nn.steps import LEVELS, LEVELS_IN_8_BITS, SaveLevel, levels_for_all, save_level
from ..patching.blocks import PatchedLayer
from ..patching.changes import is_patched
from ..patching.families import find_layers
from ..patching.levels import set_levels
from ..patching.patch import patch, patch_call, repeated_layers
from ..step.description import Step
from .technique import Change, Option, Running, Target, Technique

# The products that are done again, of those of a Llama block.
_TIMES = {
    "L1": "about as fast",
    "L2": "about 6 % slower",
    "L3": "about 7 % slower",
    "L4": "about 8 % slower",
    "L5": "about 25 % slower",
}
_SOURCE_OF_TIMES = "products done again, of those of a Llama block: docs/blocks.md"
_TIMES_OF_EXPERTS = {"L2": "at most 33 % slower", "L5": "at most 33 % slower"}
_SOURCE_OF_EXPERTS = "products done again, of those of frozen experts: docs/experts.md"


IN_8_BITS = "act8"  # what must be allowed for levels at which gradients have an error


class Levels(Technique):
    """Sets what each block keeps, and in the same patch the fused loss and the blocks whose weights
    are on the host."""

    field, default = "levels", ()
    told, row = 0, 9
    is_searched = counts = False
    allowed = {IN_8_BITS: 4}
    changes = {IN_8_BITS: "blocks keep their inputs in 8 bits, and gradients are those of these"}
    options = {
        "save": Option(
            choices=(*LEVELS, *LEVELS_IN_8_BITS.values()),
            help="save level of the blocks of headroom.nn",
        ),
        "checkpoint_every": Option(least=1),
    }

    def refusal_of_type(self, value: Any) -> str | None:
        is_good = isinstance(value, (list, tuple)) and all(type(x) is str for x in value)
        return None if is_good else "a list of names"

    def is_used(self, choice: Any) -> bool:
        return bool(choice.levels or choice.fused_loss)

    def needs(self, choice: Any) -> str:
        return IN_8_BITS * any(save_level(name).in_8_bits for name in choice.levels)

    def on_copy(self, target: Target, choice: Any) -> None:
        set_blocks(target, choice.but(weights_host=0))  # which is planned as the step says it

    def on_measured_copy(self, target: Target, choice: Any) -> None:
        """Leaves blocks as they are: they are measured at each of their levels."""

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        set_blocks(target, choice)
        return None

    def reduce_memory(self, running: Running) -> str | None:
        return running.raised.reduce_memory()

    def words(self, choice: Any) -> list[str]:
        names = sorted({*choice.levels})
        if len(names) == 1:
            return [f"all {names[0]}"]
        return [f"{choice.levels.count(name)} {name}" for name in names]

    def change(self, before: Any, after: Any, step: Step) -> tuple[str, str, str]:
        return "levels", counted(before.levels), counted(after.levels)

    def advice(self, step: Step) -> Iterator[Change]:
        if step.checkpoint_every is not None:
            return
        yield from _of_blocks(step)
        for every, cost in ((1, "about 33 % slower"), (2, "about 17 % slower")):
            yield (
                f"checkpoint_every(model, {every})",
                step.but(checkpoint_every=every),
                cost,
                "a second forward pass of the blocks: a third of their products",
                f"headroom.checkpoint_every(model, {every})",
            )
        times, source = _TIMES, _SOURCE_OF_TIMES
        if find_layers(step.model) is None:
            times, source = _TIMES_OF_EXPERTS, _SOURCE_OF_EXPERTS
        for level, model in _patched(step.model):
            code = f"headroom.patch(model{'' if level is None else f', save={level!r}'})"
            yield (
                code,
                step.but(model=model),
                "about as fast" if level is None else times[level],
                "no product is done again" if level is None else source,
                code,
            )


def set_blocks(target: Target, choice: Any) -> None:
    """Sets what one patch of the model sets of a choice."""
    set_levels(
        target.model,
        dict(zip(target.blocks, choice.levels)),
        fused_loss=choice.fused_loss,
        on_host=target.blocks[: choice.weights_host],
    )


def counted(levels: tuple[str, ...]) -> str:
    """Returns how many blocks are at each level: "2 L0, 4 L5"."""
    return ", ".join(f"{levels.count(name)} {name}" for name in sorted(set(levels)))


def _of_blocks(step: Step) -> Iterator[Change]:
    """Yields levels of the blocks of :mod:`headroom.nn` that keep less."""
    blocks = [module for module in step.model.modules() if isinstance(module, Block)]
    if not blocks:
        return
    names = [block.save for block in blocks] if step.save is None else [step.save]
    levels = [save_level(name) for name in names]
    now, on_host = max(levels), any(level.on_host for level in levels)
    for number in range(now.number + 1, len(LEVELS)):
        level = str(SaveLevel(number, on_host=on_host))
        yield (
            f"save={level!r} in all blocks",
            step.but(save=level),
            _TIMES[LEVELS[number]],
            _SOURCE_OF_TIMES,
            _set_in_all(level),
        )
    if not on_host:
        level = str(now._replace(on_host=True))
        yield (
            f"save={level!r} in all blocks",
            step.but(save=level),
            "copies to the host and back",
            "hidden where a block's copies take less than its forward pass: docs/blocks.md",
            _set_in_all(level),
        )


def _set_in_all(level: str) -> str:
    """Returns the code that sets a level, which leaves what the last block keeps on the device."""
    first, last = levels_for_all(level, 2)
    if first == last:
        return f'for block in model.blocks:\n    block.save = "{level}"'
    return (
        f'for block in model.blocks[:-1]:\n    block.save = "{first}"\n'
        f'model.blocks[-1].save = "{last}"'
    )


def _patched(model: nn.Module) -> Iterator[tuple[str | None, nn.Module]]:
    """Yields copies that were patched, each with its level. None of a model in which nothing is
    recognized, that is patched already, or that is of :mod:`headroom.nn`.

    The copies have the parameters and buffers of the model, not copies of those: modules alone are
    new, so that the model stays as it is.
    """
    if any(is_patched(module) or isinstance(module, Block) for module in model.modules()):
        return
    # Blocks that have no other levels can only be checkpointed, which is advice too.
    could = {level for layer in repeated_layers(model)[1] if layer.swaps for level in layer.levels}
    for level in (None, *(name for name in LEVELS[2:] if name in could)):
        try:
            made = copied_modules(model, lambda x: x)
            report = patch(made, save=level)
        except Exception:  # it cannot be copied or patched, and then it is not advised
            return
        if report.changed:
            yield level, made


class RaisedLevels:
    """Raises the levels of all blocks of a model, one at a time, as :func:`headroom.patch` sets
    them. The bits of the gradients stay, unless a block computes something else when it runs again:
    then :meth:`give_up`.

    Attributes:
        is_unverified: whether no step has run through at the levels that were raised.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = getattr(model, "_orig_mod", model)  # of what torch.compile returns
        self._first: dict[str | int, str] = {}  # by block, before the first was raised
        self._is_given_up = self.is_unverified = False

    def reduce_memory(self) -> str | None:
        """Sets the next level. Returns what was changed, or None if no block can keep less."""
        layers = []
        if not self._is_given_up:
            layers = repeated_layers(self._model, self._call.get("experts", True))[1]
        now: dict[str | int, str] = {layer.name: self._level(layer) for layer in layers}
        for target in LEVELS:
            raised: dict[str | int, str] = {
                layer.name: str(
                    save_level(next(level for level in layer.levels if level >= target))._replace(
                        on_host=save_level(now[layer.name]).on_host
                    )
                )
                for layer in layers
                if save_level(now[layer.name]).exact < target <= layer.levels[-1]
            }
            if raised:
                self._first, self.is_unverified = self._first or now, True
                self._set(now | raised)
                before = _span({now[name] for name in raised})
                return f"{len(raised)} blocks raised from {before} to {_span({*raised.values()})}"
        return None

    def give_up(self) -> str:
        """Sets the levels of the beginning, for good. Returns what was changed."""
        self._set(self._first)
        self._is_given_up, self.is_unverified = True, False
        return "blocks save what they saved at the beginning, and levels stay as they are"

    def _level(self, layer: PatchedLayer) -> str:
        if isinstance(layer.module, Block):
            return layer.module.save
        call = patch_call(self._model)
        if call is not None:
            return call["save"].get(layer.name, "L0")
        return "L5" if getattr(layer.module, "gradient_checkpointing", False) else "L0"

    @property
    def _call(self) -> Mapping[str, Any]:
        """Returns how the model is patched: one that was not keeps its own norms and experts, whose
        bits others do not have."""
        return patch_call(self._model) or dict.fromkeys(("norms", "glu", "rope", "experts"), False)

    def _set(self, levels: Mapping[str | int, str]) -> None:
        patch(self._model, **{**self._call, "save": levels})


def _span(levels: Collection[str]) -> str:
    return min(levels) if len(levels) == 1 else f"{min(levels)} to {max(levels)}"
