"""Gives layers of a model low-rank adapters, in place."""

from __future__ import annotations

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
from ..quantizing.choice import EXPERTS, HEAD, ROUTER, heads, is_of_experts, joined
from .attach import attach
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
    dtype: torch.dtype = torch.float32,
    name: str = "default",
) -> LoRAReport:
    """Gives linear layers of a model low-rank adapters, in place, and freezes all else (LoRA; over
    layers of :func:`headroom.quantize`, QLoRA).

    Layers become :class:`headroom.nn.LoRALinear`, whose product is at first that of the layer. They
    may be ``nn.Linear``, :class:`headroom.nn.Linear`, ``Linear4bit`` and ``Linear8bit``, Conv1D of
    transformers, and layers of bitsandbytes; embeddings that are named become
    :class:`headroom.nn.LoRAEmbedding`. A model that has adapters gets another; the new one
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
            layers but the output head and routers of experts.
        dropout: the probability with which elements of x are zero in front of A, in training.
        rslora: multiply with ``alpha / sqrt(rank)``.
        dora: train the lengths of rows of the sums too (DoRA); then one adapter is active at a
            time.
        modules_to_save: names of modules, or their ends after a dot, of which the adapter trains
            a copy, such as an output head; they become :class:`headroom.nn.TrainedCopy`.
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
    adapter = Adapter(rank, rank if alpha is None else alpha, dropout, rslora, dora)
    tied = tied_heads(model)
    wholes = with_tied(_named(model, modules_to_save), tied)
    chosen, left = _choose(model, targets, wholes, tied)
    with all_or_nothing(model):
        attach(model, dict.fromkeys(chosen, adapter), name, dtype, wholes)
        adapted, copied = [], []
        for path in chosen:
            layer: Any = model.get_submodule(path)
            numel = sum(param.numel() for param in layer.trained(name))
            was = type(layer.base_layer).__name__
            adapted.append(Adapted(path, was, rank, numel, tied.get(path)))
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
    model: nn.Module, targets: str | Iterable[str], wholes: list[str], tied: Mapping[str, str]
) -> tuple[list[str], list[Unadapted]]:
    """Returns the names of the layers that targets mean, and the other linear layers.

    Raises:
        TypeError: targets are neither names nor an expression.
        ValueError: a target names no layer, or is no regular expression.
    """
    layers, others = _layers(model)
    linears = {path: one for path, one in layers.items() if takes_adapters(one)}
    copied = {path for path in layers if any(is_in(path, whole) for whole in wholes)}
    reasons: dict[str, str] = {}
    if isinstance(targets, str) and targets == ALL:
        found = heads(model, linears) | dict.fromkeys(tied, HEAD)
        reasons = {path: why for path, why in found.items() if why in (HEAD, ROUTER)}
        chosen = [path for path in linears if path not in reasons and path not in copied]
    elif isinstance(targets, str):
        chosen = _matched(targets, layers)
    else:
        ends = list_of_names("targets", targets)
        for end in ends:
            if not any(_ends(path, end) for path in layers):
                raise ValueError(
                    f"targets: the model has no linear layer or embedding with the name {end!r}"
                )
        chosen = [path for path in layers if any(_ends(path, end) for end in ends)]
    chosen = with_tied(chosen, tied)
    if not chosen:
        raise ValueError(f"targets is {targets!r}: {type(model).__name__} has no such linear layer")
    left = [
        Unadapted(path, type(layer).__name__, reasons.get(path, "it is no target"))
        for path, layer in linears.items()
        if path not in chosen and path not in copied
    ]
    others += _experts(model)
    return chosen, left + [o for o in others if not any(is_in(o.name, whole) for whole in wholes)]


def _matched(expression: str, paths: Iterable[str]) -> list[str]:
    """Returns the names that an expression matches as a whole.

    Raises:
        ValueError: it is none.
    """
    try:
        pattern = re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"targets is {expression!r}, wanted a regular expression for names, a list of names "
            f"or {ALL!r}: {error}"
        ) from error
    return [path for path in paths if pattern.fullmatch(path)]


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


def _experts(model: nn.Module) -> list[Unadapted]:
    """Returns the parameters that hold matrices of experts, with the share that they have."""
    found = {
        joined(path, name): (type(module).__name__, param.numel())
        for path, module in outside(model)
        for name, param in module.named_parameters(recurse=False)
        if is_of_experts(module, param)
    }
    many = sum(numel for _, numel in found.values())
    whole = sum(param.numel() for param in model.parameters())
    reason = f"{EXPERTS}, which get no adapter: {many:,} of {whole:,} parameters"
    return [Unadapted(path, was, reason) for path, (was, _) in found.items()]
