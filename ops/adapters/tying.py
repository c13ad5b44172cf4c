"""Finds embeddings and output heads that have one weight, and therefore one adapter or one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..nn.linear import Linear
from ..nn.lora import LoRALayer, is_embedding
from ..nn.lora_experts import LoRAExperts
from ..nn.switched import outside
from ..nn.trained_copy import TrainedCopy


def inner(module: Any) -> nn.Module:
    """Returns what the adapters of a module stand beside, or a module that has none itself."""
    if isinstance(module, (LoRALayer, LoRAExperts)):
        return module.base_layer
    return module.original_module if isinstance(module, TrainedCopy) else module


def tied_heads(model: nn.Module) -> dict[str, str]:
    """Returns the names of the linear layers whose weight is that of an embedding, each with the
    name of this embedding."""
    embeddings: dict[int, str] = {}
    heads: dict[str, int] = {}
    for path, module in outside(model):
        base = inner(module)
        weight = base._parameters.get("weight")
        if weight is not None and is_embedding(base):
            embeddings.setdefault(id(weight), path)
        elif weight is not None and type(base) in (nn.Linear, Linear):
            heads[path] = id(weight)
    return {path: embeddings[weight] for path, weight in heads.items() if weight in embeddings}


def with_tied(paths: Iterable[str], heads: Mapping[str, str]) -> list[str]:
    """Returns names of modules, and those of the modules that are tied to them."""
    found: dict[str, None] = {}
    for path in paths:
        embedding = heads.get(path, path)
        others = [head for head, one in heads.items() if one == embedding]
        found |= dict.fromkeys([path, embedding, *others])
    return [*found]
