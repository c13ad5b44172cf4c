"""Measures what each block costs at each of its levels."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..._core.randomness import generators_kept
from ...host import trim
from ...host.engines import engine_of
from ...host.schedule import exposed_seconds, measured_link
from ...memory.alone import Alone, Bytes, Seconds
from ...memory.cpu import check_no_profiler
from ...nn.steps import LEVELS_IN_8_BITS, ON_HOST, save_level
from ...patching.blocks import verified_blocks
from ...patching.levels import Blocks
from ...step import clock
from ...step.calls import Call, results_of
from ...step.description import Step
from ...step.pass_seconds import PassSeconds, is_first_run, seconds_of_pass
from ...step.watch import hearing_blocks
from .block_costs import BlockCosts, LevelCost, Measured, is_exact, is_on_host
from .kinds import Likeness

NOISE = 1.02  # times the seconds of a level: what one that computes less again may take
WARM = 1.1  # times the seconds of blocks by themselves: what a pass takes that nothing held up


def measure_blocks(
    step: Step,
    *,
    fused_loss: bool = False,
    has_levels: bool = True,
    on_host: bool = False,
    in_8_bits: bool = False,
    repeats: int = 5,
    steps: float = 5.0,
) -> Measured:
    """Measures the blocks of a model whose levels :func:`headroom.patch` can set: one of each kind,
    by itself, with what the model calls it with.

    The model, its buffers and gradients, and the random numbers stay as they are. What is needed
    besides the memory that is there is that of a step without optimizer in which all blocks keep
    the least, and that of one block that keeps everything.

    Args:
        step: that is made, on its device; its optimizer does not count.
        fused_loss: whether a language model computes its loss without logits.
        has_levels: whether there are blocks whose levels can be set.
        on_host: whether to measure each level with what it keeps on the host, too.
        in_8_bits: whether to measure levels at which gradients have an error, too.
        repeats: how often the time of each level is taken at most, besides once while bytes are
            counted; the least counts, since what else runs only adds to it. It is taken once, and
            again as long as a level seems slower than one that computes more again.
        steps: times are taken less often, or only while bytes are counted, if measuring would
            otherwise take longer than so many passes of the model forward and backward.

    Returns:
        Costs of all blocks, in which blocks of one kind are equal.

    Raises:
        PlanError: the loss is no tensor of one element, or requires no gradient.
        RecomputeError: a block computes something else when it runs again in the backward pass, so
            that gradients would be wrong at its leanest level.
        RuntimeError: a profiler is running, which counts bytes on the CPU.
    """
    assert step.device is not None
    if step.device.type == "cpu":
        check_no_profiler()  # whose hooks in the model cannot be copied
    began = clock.now()
    with generators_kept(step.device):
        blocks = Blocks.of_copy(step.model, fused_loss=fused_loss, has_levels=has_levels)
        kinds = _Kinds(blocks, step.device, on_host, in_8_bits)
        with kinds.captured(), verified_blocks():
            first = _pass(step, blocks)
        try:
            kinds.measure(repeats, began + (1 + on_host) * steps * first.whole)
        finally:
            trim()
        found = kinds.costs()
        alone = sum(block.levels[block.leanest].seconds for block in found)
        blocks.set(blocks.leanest)
        whole = _least(step, blocks, first, alone)
    # What a model does between its blocks only adds to their time: if they are faster in it than
    # by themselves, something has held them up there.
    if alone > whole.blocks:
        found = [block.scaled(whole.blocks / alone) for block in found]
    between = max(0.0, whole.blocks - alone)
    return Measured(found, whole, whole.outside + between)


def seconds_at_leanest(
    step: Step, expected: float = 0.0, *, fused_loss: bool = False, has_levels: bool = True
) -> PassSeconds:
    """Returns the seconds of a forward and a backward pass in which all blocks keep the least. Like
    :func:`measure_blocks` it leaves everything as it is.

    Args:
        expected: seconds of the blocks; where they take longer, a second pass is run.
        step, fused_loss, has_levels: as in :func:`measure_blocks`.
    """
    with generators_kept(step.device):
        blocks = Blocks.of_copy(step.model, fused_loss=fused_loss, has_levels=has_levels)
        return _least(step, blocks, _pass(step, blocks), expected)


def _pass(step: Step, blocks: Blocks) -> PassSeconds:
    return seconds_of_pass(step, blocks.model, map(blocks.module, blocks.names))


def _least(step: Step, blocks: Blocks, first: PassSeconds, expected: float) -> PassSeconds:
    """Returns the seconds of a pass that is warm, and that nothing else held up. A second pass is
    run if the first had no blocks, or if its blocks took longer than expected."""
    if 0 < first.blocks <= WARM * expected:
        return first
    return first.least(_pass(step, blocks))


@dataclass
class _Kind:
    """Blocks that are alike, of which the first is measured."""

    number: int
    block: nn.Module
    call: Call
    names: tuple[str, ...]  # of levels: those as they are, those in 8 bits, and all on the host
    device: torch.device
    count: int = 0  # of blocks
    used: set[int] = field(default_factory=set)  # the results that get gradients
    bytes: dict[str, Bytes] = field(default_factory=dict)
    counted: dict[str, Seconds] = field(default_factory=dict)  # while bytes were counted: more
    timed: dict[str, list[Seconds]] = field(default_factory=dict)

    def alone(self) -> Alone:
        return Alone(self.block, self.call, self.device, sorted(self.used))

    def costs(self, name: str, calls: int) -> BlockCosts:
        """Returns the costs of a block of this kind that a step calls so many times."""
        levels = {level: self._cost(level, calls) for level in self.names}
        # A leaner level does no more forward and no less backward, where it computes again; what
        # else runs only adds to a time, and so do copies.
        own = [name for name in self.names if is_exact(name)]
        costs = [levels[name] for name in own]
        for number, level in enumerate(own):
            levels[level] = replace(
                levels[level],
                forward_seconds=min(c.forward_seconds for c in costs[: number + 1]),
                backward_seconds=min(c.backward_seconds for c in costs[number:]),
            )
        for level in self.names[len(own) :]:
            if is_on_host(level):
                levels[level] = self._copied(levels[level], levels[level.removesuffix(ON_HOST)])
            else:
                levels[level] = _coded(levels[level], levels[save_level(level).exact])
        gradients = max(found.gradients for found in self.bytes.values())
        largest = max(found.largest for found in self.bytes.values())
        tensors = (*self.block.parameters(), *self.block.buffers())
        weights = sum(x.nbytes for x in {*tensors})
        return BlockCosts(name, self.number, levels, gradients, largest, weights)

    def _copied(self, cost: LevelCost, stays: LevelCost) -> LevelCost:
        """Returns the cost of a level on the host, given that of the same on the device.

        Copies that wait for nothing are seen in the times of one block. Others go on beside the
        blocks before and behind it: what has left of one is still there while the next one runs,
        and what the one before has kept is back already.
        """
        # What arguments leave free is in ``held``, and not there until the forward pass has ended.
        cost = replace(cost, kept=stays.kept)
        forward, backward = stays.forward_seconds, stays.backward_seconds
        if not engine_of(self.device).is_asynchronous:
            return replace(
                cost,
                forward_seconds=max(forward, cost.forward_seconds),
                backward_seconds=max(backward, cost.backward_seconds),
            )
        count, moved = self.count, cost.moved
        late = exposed_seconds(
            [moved] * count, [forward] * count, [backward] * count, measured_link(self.device)
        )
        return replace(
            cost,
            held=cost.held - moved,
            forward=cost.forward + moved,
            backward=cost.backward + 2 * moved,
            backward_released=cost.backward_released + 2 * moved,
            forward_seconds=forward,
            backward_seconds=backward + late / count,
        )

    def are_apart(self) -> bool:
        """Returns whether the times of levels are in the order of what they compute again, and the
        level that keeps the most seems not to have been held up."""
        costs = [self._cost(level, 1) for level in self.names if is_exact(level)]
        backward = [cost.backward_seconds for cost in costs]
        in_order = all(a <= NOISE * b for a, b in zip(backward, backward[1:]))
        return in_order and costs[0].seconds <= WARM * min(cost.seconds for cost in costs)

    def _cost(self, level: str, calls: int) -> LevelCost:
        found = self.bytes[level]
        forward, backward = zip(self.counted[level], *self.timed.get(level, ()))
        return LevelCost(
            calls * found.held,
            found.backward,
            found.released,
            (calls - 1) * (found.held + found.kept) + found.forward,
            calls * found.kept,
            calls * min(forward),
            calls * min(backward),
            calls * found.moved,
            calls * found.storages,
        )


def _coded(cost: LevelCost, stays: LevelCost) -> LevelCost:
    """Returns the cost of a level in 8 bits, given that of the same as it is, to whose time codes
    add. What arguments leave free is in ``held``, and not there until the call has ended."""
    return replace(
        cost,
        kept=stays.kept,
        forward_seconds=max(stays.forward_seconds, cost.forward_seconds),
        backward_seconds=max(stays.backward_seconds, cost.backward_seconds),
    )


class _Kinds:
    """The kinds of the blocks of a model."""

    def __init__(
        self,
        blocks: Blocks,
        device: torch.device,
        on_host: bool = False,
        in_8_bits: bool = False,
    ) -> None:
        self._blocks, self._device, self._likeness = blocks, device, Likeness(blocks)
        self._on_host, self._in_8_bits = on_host, in_8_bits
        self._kinds: dict[Hashable, _Kind] = {}
        self._order: dict[str, _Kind] = {}  # of each block, in the order of calls
        self._calls: dict[str, int] = {}  # of each block in a step
        self._names = {blocks.module(name): name for name in blocks.names}

    def captured(self) -> AbstractContextManager[None]:
        """Notes the calls of blocks while it lasts."""
        return hearing_blocks(self._names, self._before, self._after)

    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._names[block]
        if not is_first_run():
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        if name in self._order:
            return
        key = self._likeness.of(name, args, kwargs)
        if key not in self._kinds:
            call = Call(args, kwargs, self._device)
            number, levels = len(self._kinds), self._blocks.levels(name)
            if self._in_8_bits:
                levels += tuple(LEVELS_IN_8_BITS[x] for x in levels if x in LEVELS_IN_8_BITS)
            if self._on_host:
                levels += tuple(level + ON_HOST for level in levels)
            self._kinds[key] = _Kind(number, block, call, levels, self._device)
        self._order[name] = self._kinds[key]
        self._kinds[key].count += 1

    def _after(self, block: nn.Module, args: Any, result: Any) -> None:
        kind = self._order.get(self._names[block])
        if kind is not None and kind.block is block:
            for k, x in enumerate(results_of(result)):
                x.register_hook(lambda grad, k=k: kind.used.add(k))

    def measure(self, repeats: int, deadline: float) -> None:
        """Measures the kinds at all levels. Times are taken of all levels in turn, or of none, so
        that what happens meanwhile on the machine is shared by all."""
        start = clock.now()
        for kind, level in self._each():
            if is_on_host(level):
                kind.alone().seconds()  # the arena takes memory for it
            kind.bytes[level], kind.counted[level] = kind.alone().bytes()
        for _ in range(repeats):
            took, start = clock.now() - start, clock.now()
            if start + took > deadline:
                return
            for kind, level in self._each():
                kind.timed.setdefault(level, []).append(kind.alone().seconds())
            if all(kind.are_apart() for kind in self._kinds.values()):
                return

    def _each(self) -> Iterator[tuple[_Kind, str]]:
        """Sets one level after the other, and yields the kinds that can be at it."""
        for level in sorted({level for kind in self._kinds.values() for level in kind.names}):
            self._blocks.set(
                {block: level for block, kind in self._order.items() if level in kind.names}
            )
            for kind in self._kinds.values():
                if level in kind.names:
                    yield kind, level

    def costs(self) -> list[BlockCosts]:
        """Returns the costs of all blocks, in the order of their first calls."""
        return [kind.costs(name, self._calls[name]) for name, kind in self._order.items()]
