"""Finds changes that would make a step smaller: each is planned again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from .._core.sizes import format_bytes
from ..step.description import Step
from ..step.errors import PlanError
from ..techniques import TECHNIQUES
from ..techniques.technique import Change
from .fine_tuning import adapters_instead
from .result import Plan
from .sharding import DDP, FSDP, Sharding

__all__ = ["Advice", "advise"]


@dataclass(frozen=True)
class Advice:
    """A change, and what it is worth by itself.

    Attributes:
        name: of the change.
        bytes: how much less the process takes on its device.
        time: the cost in time, in words.
        source: where the cost is from.
        code: lines to paste.
        plan: with the change.
    """

    name: str
    bytes: int
    time: str
    source: str
    code: str
    plan: Plan

    def __str__(self) -> str:
        code = "\n".join(f"    {line}" for line in self.code.splitlines())
        return f"{self.name}: {format_bytes(self.bytes)} less, {self.time}\n{code}"


class AdviceList(list):  # noqa: D101
    """Advice, the most bytes first."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "Nothing known would make the peak smaller."

    __repr__ = __str__


LINK = 25e9  # bytes/s each way, of PCIe 4.0 x16


def advise(
    step: Step, plan: Plan, again: Callable[[Step], Plan], top: int | None = None
) -> AdviceList:
    """Returns the changes that make the plan smaller, each planned by itself."""
    found = AdviceList()
    for name, changed, *about in _changes(step):
        try:
            other = again(changed)
        except (PlanError, ValueError, TypeError):
            continue  # it does not fit this model
        saved, copied = plan.total_bytes - other.total_bytes, other.link_bytes - plan.link_bytes
        if saved > 0:
            time, source, code = about
            if copied > 0:
                time += f"; {copied / 2 / LINK:.2f} s of copies each way at 25 GB/s, if all wait"
            found.append(Advice(name, saved, time, source, code, other))
    found.sort(key=lambda advice: -advice.bytes)
    del found[len(found) if top is None else top :]
    return found


def _changes(step: Step) -> Iterator[Change]:
    for technique in TECHNIQUES:
        yield from technique.advice(step)
    yield from adapters_instead(step)
    if step.sharding is not None:
        yield from _of_ranks(step.model, step, step.sharding)


def _of_ranks(model: nn.Module, step: Step, sharding: Sharding) -> Iterator[Change]:
    how = sharding.how
    if isinstance(how, DDP):
        if not how.gradient_as_bucket_view:
            yield (
                "gradient_as_bucket_view=True",
                step.but(
                    sharding=replace(sharding, how=replace(how, gradient_as_bucket_view=True))
                ),
                "no slower: one copy of the gradients less",
                "torch.nn.parallel.DistributedDataParallel",
                "model = DistributedDataParallel(model, gradient_as_bucket_view=True)",
            )
        try:
            sharded = sharding.but(model, FSDP())
        except ValueError:
            return  # such as shared parameters
        names = [unit.module for unit in sharded.units[1:]]
        blocks = "".join(f"fully_shard(model.get_submodule({name!r}))\n" for name in names[:1])
        if len(names) > 1:
            blocks = f"for name in {names!r}:\n    fully_shard(model.get_submodule(name))\n"
        yield (
            "fully_shard instead of DDP",
            step.but(sharding=sharded),
            "1.5 times the bytes between ranks",
            "parameters are gathered twice and gradients scattered once: Rajbhandari et al. 2020",
            "from torch.distributed.fsdp import fully_shard\n"
            f"{blocks}fully_shard(model)  # before the optimizer is made",
        )
    elif any(not unit.reshards for unit in sharding.units[1:]):
        units = tuple(
            replace(unit, reshards=bool(unit.module) or unit.reshards) for unit in sharding.units
        )
        yield (
            "reshard_after_forward=True",
            step.but(sharding=replace(sharding, units=units)),
            "1.5 times the bytes between ranks",
            "parameters are gathered again for the backward pass: Rajbhandari et al. 2020",
            "fully_shard(block, reshard_after_forward=True)  # of each block",
        )
