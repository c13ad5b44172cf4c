"""Gives layers of a model low-rank adapters, in place."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .._core.all_or_nothing import all_or_nothing
from .._core.checks import check_module, list_of_names
from .._core.registration import FLOATS
from ..nn.lora import Adapter, is_embedding, takes_adapters
from ..nn.switched import is_in, outside
from ..quantizing.choice import HEAD, ROUTER, heads, joined
from .attach import attach
from .experts import check_experts, chosen_stacks, experts_in, left_experts, stacks_of
from .report import Adapted, Copied, LoRAReport, Unadapted
from .tying import tied_heads, with_tied

ALL = "all-linear"


def lora(
    model: nn.Module,
    rank: int = 16,
    *,
    alpha: float | None = None,
    targets: str | Iterable[str] = ALL,
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    modules_to_save: Iterable[str] = (),
    experts: bool | int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "default",
) -> LoRAReport:
    """Gives linear layers of a model low-rank adapters, in place, and freezes all else (LoRA; over
    layers of :func:`headroom.quantize`, QLoRA).

    Layers become :class:`headroom.nn.LoRALinear`, whose product is at first that of the layer. They
    may be ``nn.Linear``, :class:`headroom.nn.Linear`, ``Linear4bit`` and ``Linear8bit``, Conv1D of
    transformers, and layers of bitsandbytes; embeddings that are named become
    :class:`headroom.nn.LoRAEmbedding`, and experts of mixtures, which are asked for or named,
    :class:`headroom.nn.LoRAExperts`. A model that has adapters gets another; the new one
    is then the only one that is active and trains (:func:`headroom.adapters.use_adapters`). Make
    the optimizer afterwards, over the parameters that require gradients.

    An embedding and an output head that have one weight stay tied: where one is named, in
    ``targets`` or ``modules_to_save``, both get one adapter, or one copy of the weight (PEFT's
    ``ensure_weight_tying=True``).

    Args:
        model: any module that holds such layers.
        rank: rows of A and columns of B.
        alpha: B A is multiplied with ``alpha / rank``; None: ``rank``, so with 1.
        targets: as PEFT reads it: names of linear layers and embeddings, or their ends after a
            dot; a string is a regular expression for whole names; "all-linear" is all linear
            layers but the output head and routers of experts. Names of stacks of experts, such
            as "experts.down_proj", choose these, as PEFT's ``target_parameters``; one that linear
            layers have too means those alone, but with ``experts``.
        dropout: the probability with which elements of x are zero in front of A, in training.
        rslora: multiply with ``alpha / sqrt(rank)``.
        dora: train the lengths of rows of the sums too (DoRA); then one adapter is active at a
            time.
        modules_to_save: names of modules, or their ends after a dot, of which the adapter trains
            a copy, such as an output head; they become :class:`headroom.nn.TrainedCopy`.
        experts: the rank of adapters of experts, or True for ``rank`` divided by the number of
            experts of a token, and at least 1; ``alpha`` is smaller in the same ratio. All stacks
            get one if ``targets`` name none. None: only stacks that are named, with ``rank``.
        dtype: of A and B. x is not cast to it: they are, to the dtype of x, for each product.
        name: of the adapter, without dots.

    Returns:
        What was done, and which linear layers were left: ``print(report)``.

    Raises:
        TypeError: an argument has another type, or a weight is a DTensor.
        ValueError: an argument is none of the above; a name is that of no layer or module; a layer
            has an adapter of this name, or its weight is that of another module too, other than of
            an embedding and its head; or DoRA cannot read the weight, or would untie it.

    Nothing is changed where it raises or is interrupted.
    """
    check_module(model)
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}, wanted one of {FLOATS}")
    check_experts(experts)
    adapter = Adapter(rank, rank if alpha is None else alpha, dropout, rslora, dora)
    tied, rules = tied_heads(model), experts_in(model)
    wholes = with_tied(_named(model, modules_to_save), tied)
    chosen, named, left = _choose(model, targets, wholes, tied, [*stacks_of(rules)], bool(experts))
    stacks = chosen_stacks(model, rules, experts, named, adapter)
    if not chosen and not stacks:
        raise ValueError(f"targets is {targets!r}: {type(model).__name__} has no such linear layer")
    left += left_experts(
        model, rules, stacks, bool(stacks), lambda path: any(is_in(path, one) for one in wholes)
    )
    with all_or_nothing(model):
        attach(model, dict.fromkeys(chosen, adapter), name, dtype, wholes, stacks, rules)
        adapted, copied = [], []
        for path in chosen:
            layer: Any = model.get_submodule(path)
            numel = sum(param.numel() for param in layer.trained(name))
            was = type(layer.base_layer).__name__
            adapted.append(Adapted(path, was, rank, numel, tied.get(path)))
        for path, adapters in stacks.items():
            layer = model.get_submodule(path)
            was = type(layer.base_layer).__name__
            for stack, numbers in adapters.items():
                numel = sum(param.numel() for param in layer.matrices(name, stack))
                adapted.append(Adapted(joined(path, stack), was, numbers.rank, numel))
        for path in wholes:
            one: Any = model.get_submodule(path)
            params = one.trained(name)
            if path in tied:
                params = [p for p in params if p is not one.modules_to_save[name].weight]
            numel = sum(param.numel() for param in params)
            copied.append(Copied(path, type(one.original_module).__name__, numel, tied.get(path)))
        return LoRAReport(model, adapted, left, copied)


def _named(model: nn.Module, ends: Iterable[str]) -> list[str]:
    """Returns the names of the modules that have these names, or end so.

    Raises:
        TypeError: ``ends`` is no list.
        ValueError: the model has no such module.
    """
    found = [path for path, _ in outside(model)]
    ends = list_of_names("modules_to_save", ends)
    for end in ends:
        if not any(_ends(path, end) for path in found):
            raise ValueError(f"modules_to_save: the model has no module with the name {end!r}")
    return [path for path in found if any(_ends(path, end) for end in ends)]


def _choose(
    model: nn.Module,
    targets: str | Iterable[str],
    wholes: list[str],
    tied: Mapping[str, str],
    stacks: list[str],
    both: bool,
) -> tuple[list[str], list[str], list[Unadapted]]:
    """Returns the names of the layers that targets mean, those of the stacks of experts that they
    mean, and the other linear layers.

    Args:
        stacks: the names of all stacks.
        both: whether a target that linear layers match means the stacks that it matches, too.

    Raises:
        TypeError: targets are neither names nor an expression.
        ValueError: a target names no layer, or is no regular expression.
    """
    layers, left = _layers(model)
    linears = {path: one for path, one in layers.items() if takes_adapters(one)}
    copied = {path for path in layers if any(is_in(path, whole) for whole in wholes)}
    reasons: dict[str, str] = {}
    meant: set[str] = set()
    if isinstance(targets, str) and targets == ALL:
        found = heads(model, linears) | dict.fromkeys(tied, HEAD)
        reasons = {path: why for path, why in found.items() if why in (HEAD, ROUTER)}
        chosen = [path for path in linears if path not in reasons and path not in copied]
    else:
        meant = _meant(targets, [*layers], stacks, both)
        chosen = [path for path in layers if path in meant]
    chosen = with_tied(chosen, tied)
    others = [
        Unadapted(path, type(layer).__name__, reasons.get(path, "it is no target"))
        for path, layer in linears.items()
        if path not in chosen and path not in copied
    ]
    left = [one for one in left if not any(is_in(one.name, whole) for whole in wholes)]
    return chosen, [name for name in stacks if name in meant], others + left


def _meant(
    targets: str | Iterable[str], layers: list[str], stacks: list[str], both: bool
) -> set[str]:
    """Returns the names that an expression matches as a whole, or that have one of the ends.

    Raises:
        TypeError: targets are neither.
        ValueError: a target matches none.
    """
    if isinstance(targets, str):
        pattern = _compiled(targets)
        tests = [(targets, lambda path: pattern.fullmatch(path) is not None)]
    else:
        ends = list_of_names("targets", targets)
        tests = [(end, functools.partial(_ends, end=end)) for end in ends]
    meant: set[str] = set()
    for target, test in tests:
        found = [path for path in layers if test(path)]
        if both or not found:
            found += [name for name in stacks if test(name)]
        if not found and not isinstance(targets, str):
            raise ValueError(
                f"targets: the model has no linear layer or embedding with the name {target!r}"
            )
        meant |= {*found}
    return meant


def _compiled(expression: str) -> re.Pattern[str]:
    """Returns an expression for names.

    Raises:
        ValueError: it is none.
    """
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"targets is {expression!r}, wanted a regular expression for names, a list of names "
            f"or {ALL!r}: {error}"
        ) from error


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _layers(model: nn.Module) -> tuple[dict[str, nn.Module], list[Unadapted]]:
    """Returns the layers that can have adapters, by name, and linear layers that cannot."""
    layers: dict[str, nn.Module] = {}
    others = []
    for path, module in outside(model):
        if takes_adapters(module) or is_embedding(module):
            layers[path] = module
        elif isinstance(module, nn.Linear):
            reason = "a subclass of Linear, which may use its weight in another way"
            others.append(Unadapted(path, type(module).__name__, reason))
    return layers, others
