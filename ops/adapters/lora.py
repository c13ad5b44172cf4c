"""Gives the linear layers of a model low-rank adapters, in place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .._core.registration import FLOATS
from ..nn.lora import Adapter, LoRALinear, attach, takes_adapters
from ..quantizing.choice import HEAD, heads
from .report import Adapted, LoRAReport, Unadapted

ALL = "all-linear"


def lora(
    model: nn.Module,
    rank: int = 16,
    *,
    alpha: float | None = None,
    targets: str | Iterable[str] = ALL,
    dropout: float = 0.0,
    rslora: bool = False,
    dtype: torch.dtype = torch.float32,
    name: str = "default",
) -> LoRAReport:
    """Gives linear layers of a model low-rank adapters, in place, and freezes all else (LoRA; over
    layers of :func:`headroom.quantize`, QLoRA).

    Layers become :class:`headroom.nn.LoRALinear`, whose product is at first that of the layer. They
    may be ``nn.Linear``, :class:`headroom.nn.Linear`, ``Linear4bit`` and ``Linear8bit``, Conv1D of
    transformers, and layers of bitsandbytes. A model that has adapters gets another; the new one
    is then the only one that is active and trains (:func:`headroom.adapters.use_adapters`). Make
    the optimizer afterwards, over the parameters that require gradients.

    Args:
        model: any module that holds such layers.
        rank: rows of A and columns of B.
        alpha: B A is multiplied with ``alpha / rank``; None: ``rank``, so with 1.
        targets: as PEFT reads it: names of layers, or their ends after a dot; a string is a
            regular expression for whole names; "all-linear" is all but the output head.
        dropout: the probability with which elements of x are zero in front of A, in training.
        rslora: multiply with ``alpha / sqrt(rank)``.
        dtype: of A and B. x is not cast to it: they are, to the dtype of x, for each product.
        name: of the adapter, without dots.

    Returns:
        What was done, and which linear layers were left: ``print(report)``.

    Raises:
        TypeError: an argument has another type, or a weight is a DTensor.
        ValueError: an argument is none of the above; a target names no layer; a layer has an
            adapter of this name, or its weight is that of another module too. Nothing is changed
            then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}, wanted an instance of nn.Module")
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}, wanted one of {FLOATS}")
    adapter = Adapter(rank, rank if alpha is None else alpha, dropout, rslora)
    chosen, left = _choose(model, targets)
    attach(model, dict.fromkeys(chosen, adapter), name, dtype)
    adapted = []
    for path in chosen:
        layer: Any = model.get_submodule(path)
        numel = layer.lora_A[name].weight.numel() + layer.lora_B[name].weight.numel()
        adapted.append(Adapted(path, type(layer.base_layer).__name__, rank, numel))
    return LoRAReport(model, adapted, left)


def _choose(model: nn.Module, targets: str | Iterable[str]) -> tuple[list[str], list[Unadapted]]:
    """Returns the names of the layers that targets mean, and the other linear layers.

    Raises:
        ValueError: a target names no layer.
    """
    layers, others = _linears(model)
    if targets == ALL:
        answers = heads(model, layers)
        chosen = [path for path in layers if answers.get(path) != HEAD]
        reason = HEAD
    elif isinstance(targets, str):
        chosen = [path for path in layers if re.fullmatch(targets, path)]
        reason = "it is no target"
    else:
        ends = [*targets]
        for end in ends:
            if not any(_ends(path, end) for path in layers):
                raise ValueError(f"targets: the model has no linear layer with the name {end!r}")
        chosen = [path for path in layers if any(_ends(path, end) for end in ends)]
        reason = "it is no target"
    if not chosen:
        raise ValueError(f"targets is {targets!r}: {type(model).__name__} has no such linear layer")
    left = [
        Unadapted(path, type(layer).__name__, reason)
        for path, layer in layers.items()
        if path not in chosen
    ]
    return chosen, left + others


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _linears(model: nn.Module) -> tuple[dict[str, nn.Module], list[Unadapted]]:
    """Returns the layers that can have adapters, by name, and linear layers that cannot."""
    layers: dict[str, nn.Module] = {}
    others, inside = [], set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, LoRALinear):
            inside |= {*module.modules()}
        if takes_adapters(module):
            layers[path] = module
        elif isinstance(module, nn.Linear):
            reason = "a subclass of Linear, which may use its weight in another way"
            others.append(Unadapted(path, type(module).__name__, reason))
    return layers, others
