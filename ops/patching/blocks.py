"""The repeated blocks of a model, and which level each of them gets."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .._core.recompute import inside_checkpoint
from .._core.surroundings import later_calls
from ..checkpointing import checkpoint
from ..checkpointing.caches import checkpoints_by_itself, without_caches
from ..checkpointing.every import repeated_blocks
from ..host.saved import saved_on_host
from ..nn import LEVELS, Block
from ..nn.experts import ExpertsRule
from ..nn.steps import SaveLevel, levels_for_all, save_level
from .changes import Changes
from .experts import keep_choices, swap_experts
from .report import PatchReport
from .routing import keeping_choices

KNOWN = "Llama, Qwen2, Qwen3, Mistral, Gemma 1 to 3, Phi-3, GPT-2 and BERT of transformers"

LEANEST_FREE = "L1"  # computes no product again

_verifying: set[object] = set()  # one for each verified_blocks() that lasts, in any thread

CHECKPOINT_OPTIONS = inspect.signature(checkpoint).parameters.values()


@dataclasses.dataclass(frozen=True)
class Options:
    """Holds what patch() was asked for, besides the levels.

    Attributes:
        norms, glu, rope, experts: whether these are swapped.
        checkpoint: options of :func:`headroom.checkpoint`, for blocks at L5 that are checkpointed.
    """

    norms: bool = True
    glu: bool = True
    rope: bool = True
    experts: bool = True
    checkpoint: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = [p.name for p in CHECKPOINT_OPTIONS if p.kind == p.KEYWORD_ONLY]
        if wrong := sorted(self.checkpoint.keys() - set(wanted)):
            raise ValueError(
                f"headroom.patch: checkpoint_options has {wrong[0]!r}, wanted options of "
                f"headroom.checkpoint: {', '.join(wanted)}"
            )


class PatchedLayer(Protocol):
    """One repeated block of a model.

    Attributes:
        name: of the module in the model, as in ``named_modules()``.
        module: the block.
        levels: those that it can be set to.
        swaps: whether setting one of them lets other code compute what is in the block.
    """

    name: str
    levels: Sequence[str]
    swaps: bool

    @property
    def module(self) -> nn.Module: ...

    def patch(
        self, level: str | None, options: Options, changes: Changes, report: PatchReport
    ) -> None:
        """Sets ``level``, or leaves what the block keeps as it is if that is None, and swaps what
        ``options`` asks for inside the block. Says so in the report. The generic part looks
        afterwards at norms in the block that have neither been changed nor claimed."""
        ...


@dataclasses.dataclass
class HeadroomBlock:
    """A block of :mod:`headroom.nn`, which has the dial already."""

    name: str
    module: Block
    levels: Sequence[str] = LEVELS
    swaps: bool = False

    def patch(
        self, level: str | None, options: Options, changes: Changes, report: PatchReport
    ) -> None:
        if level is not None:
            changes.set(self.module, "_level", save_level(level))
            report._set_level(self.name, self.module, level)


@dataclasses.dataclass
class AnyBlock:
    """A block of a class that nothing is known of: it keeps everything, or its inputs alone."""

    name: str
    module: nn.Module
    levels: Sequence[str] = ("L0", "L5")
    swaps: bool = False

    def patch(
        self, level: str | None, options: Options, changes: Changes, report: PatchReport
    ) -> None:
        if level is None:
            return
        module = self.module
        if checkpoints_by_itself(module):
            # The forward of the class would drop even a cache that has been filled.
            changes.set(module, "gradient_checkpointing", False)
        save = save_level(level)
        if save.number == 5 or save.on_host:
            own, of_checkpoint = vars(module).get("forward"), dict(options.checkpoint)
            if save.on_host:
                of_checkpoint["host"] = True
            if save.in_8_bits:
                if of_checkpoint.get("verify"):
                    raise ValueError(
                        f"headroom.patch: save is {level!r} for {self.name}, and verify is in "
                        "checkpoint_options, but what is computed again from rounded inputs always "
                        f"differs; verify at {save.exact!r}"
                    )
                of_checkpoint["in_8_bits"] = True
            forward = _forward if save.number == 5 else _forward_on_host
            changes.set(module, "forward", functools.partial(forward, module, of_checkpoint, own))
        report._set_level(self.name, module, level)


@dataclasses.dataclass
class ExpertsBlock(AnyBlock):
    """A block of which nothing is known but its experts: at L0 to L2 it keeps what these keep at
    that level, and everything else; at L5 its inputs and which experts were chosen.

    Attributes:
        model: that the block is in.
        found: the experts in the model.
    """

    model: nn.Module = dataclasses.field(kw_only=True)
    found: dict[nn.Module, ExpertsRule | str] = dataclasses.field(kw_only=True)
    levels: Sequence[str] = ("L0", "L1", "L2", "L5")
    swaps: bool = True

    def patch(
        self, level: str | None, options: Options, changes: Changes, report: PatchReport
    ) -> None:
        name = LEANEST_FREE if level is None else save_level(level).exact
        is_again = name == "L5"  # where what costs a product would be computed three times
        save = LEANEST_FREE if is_again else name
        swap_experts(self.model, self.module, self.found, save, changes, report)
        if is_again:
            keep_choices(self.module, self.found, changes)
        if level is None:  # a checkpoint of transformers stays
            report._set_level(self.name, self.module, name)
        else:
            super().patch(level, options, changes, report)


@contextmanager
def verified_blocks() -> Iterator[None]:
    """Lets blocks at L5 that run forward, besides those of :mod:`headroom.nn`, those that keep
    their inputs in 8 bits and those that torch.compile traces, raise
    :class:`headroom.checkpointing.RecomputeError` in the backward pass if they compute something
    else when they run again."""
    token = object()
    _verifying.add(token)
    try:
        yield
    finally:
        _verifying.remove(token)


def _forward(
    module: nn.Module,
    options: dict[str, Any],
    own: Callable[..., Any] | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Takes the place of the forward of a block at L5."""
    run = functools.partial(type(module).forward, module) if own is None else own
    if not module.training or not torch.is_grad_enabled() or _checkpoints_itself(module):
        return run(*args, **kwargs)
    given = without_caches(module, "save levels", args, kwargs)
    if given is None:
        return run(*args, **kwargs)  # what a cache takes cannot be computed again
    args, kwargs = given
    return _checkpointed(module, options, functools.partial(run, **kwargs), *args)


def _forward_on_host(
    module: nn.Module, _: Any, own: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Takes the place of the forward of a block at L0@host."""
    run = functools.partial(type(module).forward, module) if own is None else own
    with saved_on_host(stay=(*args, *kwargs.values())):
        return run(*args, **kwargs)


def _checkpoints_itself(module: nn.Module) -> bool:
    """Returns whether transformers was told to checkpoint a block after it was patched."""
    return checkpoints_by_itself(module) and getattr(module, "gradient_checkpointing", False)


def _checkpointed(
    module: nn.Module,
    options: dict[str, Any],
    run: Callable[..., Any],
    /,
    *args: Any,
) -> Any:
    """Returns ``run(*args)``, the forward of ``module``, and keeps its inputs alone."""
    if torch.compiler.is_compiling():
        return checkpoint(run, *args, **options)
    if inside_checkpoint() or torch._C._are_functorch_transforms_active():
        # It is computed again already, or a checkpoint cannot have its hooks.
        return run(*args)
    if _verifying and not options.get("in_8_bits"):
        options = options | {"verify": True}
    run = keeping_choices(run)
    if not options.get("use_reentrant") and _norms_with_statistics(module):
        run = later_calls(run, functools.partial(_without_statistics, module))
    return checkpoint(run, *args, **options)


def _norms_with_statistics(module: nn.Module) -> list[_NormBase]:
    return [
        part
        for part in module.modules()
        if isinstance(part, _NormBase) and part.training and part.track_running_stats
    ]


@contextmanager
def _without_statistics(module: nn.Module) -> Iterator[None]:
    """Keeps a run in the backward pass from moving the running statistics a second time."""
    held = [
        (norm, norm.momentum, norm.num_batches_tracked, norm.num_batches_tracked.clone())
        for norm in _norms_with_statistics(module)
        if norm.num_batches_tracked is not None
    ]
    for norm, *_ in held:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, counter, count in held:
            norm.momentum = momentum
            counter.copy_(count)


def find_blocks(
    model: nn.Module,
    known: Sequence[PatchedLayer] = (),
    experts: dict[nn.Module, ExpertsRule | str] | None = None,
) -> list[PatchedLayer]:
    """Returns the blocks of a model whose levels can be set, in the order of ``named_modules()``:
    those that are ``known``, blocks of :mod:`headroom.nn`, and repeated blocks beside these, such
    as those of a vision tower. Those with some of the ``experts`` have levels of these."""
    experts = experts or {}
    swapped = {module for module, rule in experts.items() if not isinstance(rule, str)}
    found = {layer.name: layer for layer in known}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            found[name] = HeadroomBlock(name, module)
    alone = not found
    around = {name[:k] for name in found for k, c in enumerate(name) if c == "."}
    for name, module in _called_blocks(model):
        parents = {name[:k] for k, c in enumerate(name) if c == "."} | {name}
        if alone or (name not in around and not parents & found.keys() and any(module.children())):
            if swapped.isdisjoint(module.modules()):
                found[name] = AnyBlock(name, module)
            else:
                found[name] = ExpertsBlock(name, module, model=model, found=experts)
    return [found[name] for name, _ in model.named_modules() if name in found]


def _called_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the repeated blocks, and where these are lists, which are not called, those in
    them."""
    for name, module in repeated_blocks(model):
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{inner}", block) for inner, block in _called_blocks(module))
        elif not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def chosen_levels(
    save: str | Sequence[str | None] | Mapping[str | int, str] | None,
    layers: Sequence[PatchedLayer],
    model: nn.Module,
) -> list[str | None]:
    """Returns the level of each block, or None for those that stay as they are.

    Raises:
        ValueError: ``save`` does not fit the blocks.
    """
    if save is None:
        return [None] * len(layers)
    kind = type(model).__name__
    if not layers:
        raise ValueError(
            f"headroom.patch: save is {save!r}, but {kind} has no repeated blocks: no ModuleList "
            "or Sequential of two or more modules of one class; patch it without save, or use "
            "headroom.checkpoint in its forward"
        )
    if isinstance(save, str):
        # Blocks that cannot be at a level stay as they are beside some that can.
        can = [_level_of(layer, save).exact in layer.levels for layer in layers]
        levels: list[str | None] = [
            level if fits or not any(can) else None
            for level, fits in zip(levels_for_all(save, len(layers)), can)
        ]
    elif isinstance(save, Mapping):
        levels = by_block("save", save, layers, model)
    elif not isinstance(save, Sequence):
        raise ValueError(f"headroom.patch: save is {save!r}, wanted levels, such as 'L5'")
    else:
        levels = [*save]
        if len(levels) != len(layers):
            raise ValueError(
                f"headroom.patch: save has {len(levels)} levels, wanted {len(layers)}, one for "
                f"each block of {kind}, from {layers[0].name} to {layers[-1].name}"
            )
    for layer, level in zip(layers, levels):
        if level is None:
            continue
        if _level_of(layer, level).exact not in layer.levels:
            raise ValueError(
                f"headroom.patch: save is {level} for {layer.name}, a "
                f"{type(layer.module).__name__}, which can be at {' or '.join(layer.levels)}; the "
                f"levels between are for blocks of headroom.nn and of {KNOWN}, and L1 and L2 for "
                "blocks with experts that can be swapped, too; docs/experts.md says which"
            )
    return levels


def _level_of(layer: PatchedLayer, name: Any) -> SaveLevel:
    try:
        return save_level(name, layer.name)
    except ValueError as error:
        raise ValueError(f"headroom.patch: {error}") from None


def by_block(
    argument: str,
    given: Mapping[str | int, str],
    layers: Sequence[PatchedLayer],
    model: nn.Module,
) -> list[str | None]:
    """Returns for each block what an argument of :func:`patch` gives it by its name or number."""
    places: dict[str | int, int] = {layer.name: k for k, layer in enumerate(layers)}
    places |= {k: k for k in range(len(layers))}
    found: list[str | None] = [None] * len(layers)
    for key, value in given.items():
        if key not in places:
            kind = type(model).__name__
            wanted = (
                f"a number below {len(layers)} or a name from {layers[0].name} to {layers[-1].name}"
                if layers
                else "none"
            )
            raise ValueError(
                f"headroom.patch: {argument} has {key!r}, which is no block of {kind}; wanted "
                f"{wanted}"
            )
        found[places[key]] = value
    return found
