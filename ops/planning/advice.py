"""Finds changes that would make a step smaller: each is planned again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .._core.module_copies import copied_modules
from .._core.sizes import format_bytes
from ..nn.block import Block
from ..nn.steps import LEVELS, SaveLevel, levels_for_all, save_level
from ..optim import SGD, Adafactor
from ..optim.muon.muon import ADAMW
from ..patching import patch
from ..patching.changes import is_patched
from ..patching.families import find_layers
from ..patching.streaming import streamed_blocks
from ..state.convert.bitsandbytes import is_bitsandbytes, options_from
from ..step.description import Step, class_of_optimizer
from ..step.errors import PlanError
from ..step.micro_batches import resized, samples_of
from ..step.optimizers import counterparts_named
from .fine_tuning import Change, adapters_instead, fewer_bits
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

# The products that are done again, of those of a Llama block.
_TIMES = {
    "L1": "about as fast",
    "L2": "about 6 % slower",
    "L3": "about 7 % slower",
    "L4": "about 8 % slower",
    "L5": "about 25 % slower",
}
_OPTIONS = (
    *("lr", "betas", "eps", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    *("adamw", "split", "convolutions", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
    *("variant", "ns_dtype", "normuon"),
)
_SOURCE_OF_TIMES = "products done again, of those of a Llama block: docs/blocks.md"


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
    optimizer = step.optimizer
    options = _options(optimizer)
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    given = f", {given}" if given else ""
    if optimizer is not None:
        yield from _of_optimizer(step, options, given)
    yield from _of_activations(step)
    yield from _of_patch(step)
    yield from _of_host(step)
    yield from adapters_instead(step)
    yield from fewer_bits(step)
    if step.sharding is not None:
        yield from _of_ranks(step.model, step, step.sharding)
    elif _is_headroom(optimizer) and not step.release and step.max_grad_norm is None:
        yield (
            "release gradients",
            step.but(release=True),
            "no slower",
            "the same updates, in the backward pass",
            "handle = headroom.release_gradients(model, optimizer)",
        )
    size = samples_of(step.batch)
    if step.accumulation == 1 and size is not None and size % 2 == 0:
        yield (
            "two micro-batches of half the size",
            step.but(batch=resized(step.batch, size // 2), accumulation=2),
            "about as fast while a half still fills the device",
            "the same products, in two halves",
            "for part in halves(batch):  # then one optimizer.step()\n"
            "    (loss_of(model, part) / 2).backward()",
        )


def _of_optimizer(step: Step, options: dict[str, Any], given: str) -> Iterator[Change]:
    classes = _counterparts(step.optimizer)
    if not classes:
        return
    ours, eight_bit = classes["headroom"], classes["8bit"]
    params = "model" if _takes_model(step.optimizer, ours) else "model.parameters()"
    is_8bit = class_of_optimizer(step.optimizer).__name__ == eight_bit.__name__
    if not is_8bit and not _is_headroom(step.optimizer):
        yield (
            f"headroom.optim.{ours.__name__}",
            step.but(optimizer=_maker(ours, options, params)),
            "faster: one pass over the parameters",
            "README, table of optimizers",
            f"optimizer = headroom.optim.{ours.__name__}({params}{given})",
        )
    if not is_8bit:
        yield (
            f"headroom.optim.{eight_bit.__name__}",
            step.but(optimizer=_maker(eight_bit, options, params)),
            "no slower: 8-bit states are fewer bytes to move",
            "README, table of optimizers",
            f"optimizer = headroom.optim.{eight_bit.__name__}({params}{given})",
        )
        if "adafactor" in classes:
            yield (
                "headroom.optim.Adafactor",
                step.but(optimizer=_maker(Adafactor, {}, params)),
                "no slower, but another optimizer: the learning rate is to be found again",
                "Shazeer and Stern 2018",
                "optimizer = headroom.optim.Adafactor(model.parameters())",
            )
    dtypes = {p.dtype for p in step.model.parameters() if p.requires_grad}
    if dtypes == {torch.float32} and not step.scaler:
        keep = {key: value for key, value in options.items() if key != "master"}
        maker = eight_bit if is_8bit else ours
        yield (
            "parameters in bfloat16 with a 16-bit remainder",
            step.but(
                dtype=torch.bfloat16,
                amp=None,
                optimizer=_maker(maker, keep | {"master": "remainder16"}, params),
            ),
            "faster: 16-bit products",
            "the remainder keeps the bits of float32 weights; docs/weights-16bit.md",
            "headroom.cast_model(model, torch.bfloat16)\n"
            f"optimizer = headroom.optim.{maker.__name__}({params}, "
            'master="remainder16"' + given + ")",
        )


def _of_activations(step: Step) -> Iterator[Change]:
    blocks = [module for module in step.model.modules() if isinstance(module, Block)]
    if blocks and step.checkpoint_every is None:
        names = [block.save for block in blocks] if step.save is None else [step.save]
        levels = [save_level(name) for name in names]
        now, on_host = max(levels).number, any(level.on_host for level in levels)
        for number in range(now + 1, len(LEVELS)):
            level = str(SaveLevel(number, on_host))
            yield (
                f"save={level!r} in all blocks",
                step.but(save=level),
                _TIMES[LEVELS[number]],
                _SOURCE_OF_TIMES,
                _set_in_all(level),
            )
        if not on_host:
            level = str(SaveLevel(now, True))
            yield (
                f"save={level!r} in all blocks",
                step.but(save=level),
                "copies to the host and back",
                "hidden where a block's copies take less than its forward pass: docs/blocks.md",
                _set_in_all(level),
            )
    if step.checkpoint_every is None:
        for every, cost in ((1, "about 33 % slower"), (2, "about 17 % slower")):
            yield (
                f"checkpoint_every(model, {every})",
                step.but(checkpoint_every=every),
                cost,
                "a second forward pass of the blocks: a third of their products",
                f"headroom.checkpoint_every(model, {every})",
            )


def _of_host(step: Step) -> Iterator[Change]:
    """Yields what can be on the host. Where host and device are one, nothing is gained by it."""
    if step.device is None or step.device.type != "cuda" or step.sharding is not None:
        return
    source = "copies beside the backward pass, and which of them wins when: docs/offloading.md"
    is_away = step.offload is not None or getattr(step.optimizer, "paging", None) is not None
    if _is_headroom(step.optimizer) and not is_away:
        for what, name in (("state", "optimizer state"), ("step", "the optimizer's step")):
            yield (
                f"{name} on the host",
                step.but(offload=what),
                "the same bits",
                source,
                f'headroom.optim.offload(optimizer, "{what}")',
            )
    if step.weights is None and not streamed_blocks(step.model):
        yield (
            "weights of blocks on the host",
            step.but(weights="host"),
            "the same bits",
            source,
            'headroom.patch(model, weights="host")',
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


def _of_patch(step: Step) -> Iterator[Change]:
    if step.checkpoint_every is not None:
        return
    for level, model in _patched(step.model):
        given = "" if level is None else f", save={level!r}"
        yield (
            f"headroom.patch(model{given})",
            step.but(model=model),
            "about as fast" if level is None else _TIMES[level],
            "no product is done again" if level is None else _SOURCE_OF_TIMES,
            f"headroom.patch(model{given})",
        )


def _patched(model: nn.Module) -> Iterator[tuple[str | None, nn.Module]]:
    """Yields copies that were patched, each with its level. None of a model in which nothing is
    recognized, that is patched already, or that is of :mod:`headroom.nn`.

    The copies have the parameters and buffers of the model, not copies of those: modules alone are
    new, so that the model stays as it is.
    """
    if any(is_patched(module) or isinstance(module, Block) for module in model.modules()):
        return
    # Other blocks than those of known architectures can only be checkpointed, which is advice too.
    levels = (None, "L2", "L3", "L4", "L5") if find_layers(model) is not None else (None,)
    for level in levels:
        try:
            made = copied_modules(model, lambda x: x)
            report = patch(made, save=level)
        except Exception:  # it cannot be copied or patched, and then it is not advised
            return
        if report.changed:
            yield level, made


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


def _is_headroom(optimizer: Any) -> bool:
    return getattr(class_of_optimizer(optimizer), "__module__", "").startswith("headroom")


def _counterparts(optimizer: Any) -> dict[str, Any]:
    """Returns the counterparts of an optimizer by the name of its class, whose ever it is."""
    return counterparts_named(getattr(class_of_optimizer(optimizer), "__name__", ""))


def _takes_model(optimizer: Any, ours: Any) -> bool:
    """Returns whether Headroom's counterpart is made of the model, which torch's Muon, with some of
    its matrices, is not."""
    return getattr(ours, "takes_model", False) and _is_headroom(optimizer)


def _options(optimizer: Any) -> dict[str, Any]:
    """Returns the options that differ from the defaults of Headroom's counterpart, of the first
    group."""
    classes = _counterparts(optimizer)
    if not hasattr(optimizer, "param_groups"):
        found = getattr(optimizer, "keywords", {})
    else:
        found = optimizer.param_groups[0]
        if classes.get("headroom") is SGD and is_bitsandbytes(optimizer):
            found = options_from(found, "sgd", [])
        if _takes_model(optimizer, classes.get("headroom")):
            whole = optimizer.whole_arguments
            adamw = {key: value for key, value in whole["adamw"].items() if ADAMW.get(key) != value}
            found = {**found, **whole, "adamw": adamw}
    usual = inspect.signature(classes["headroom"]).parameters if classes else {}
    return {
        key: found[key]
        for key in _OPTIONS
        if key in usual and isinstance(found.get(key), (int, float, tuple, str, dict))
        if found[key] not in (usual[key].default, {})
    }


def _maker(kind: Any, options: dict[str, Any], params: str) -> Callable[[Any], Any]:
    def make(params: Any) -> Any:
        return kind(params, **options)

    make.__name__, make.__module__ = kind.__name__, kind.__module__
    make.takes_model = params == "model"  # type: ignore[attr-defined]
    return make
