"""Puts modules with an adapter in the places of a model's own, and freezes all else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..nn.experts import ExpertsRule
from ..nn.lora import Adapter, LoRAEmbedding, LoRALayer, LoRALinear, is_embedding, takes_adapters
from ..nn.lora_experts import LoRAExperts
from ..nn.lora_weight import LoRAWeight
from ..nn.switched import Switched, activate, is_in, replace, switched
from ..nn.torch_encoder import call_linears
from ..nn.trained_copy import TrainedCopy
from .tying import tied_heads, with_tied

CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict  # never called


def attach(
    model: nn.Module,
    wanted: Mapping[str, Adapter],
    name: str,
    dtype: torch.dtype | None,
    copied: Iterable[str] = (),
    stacks: Mapping[str, Mapping[str, Adapter]] | None = None,
    rules: Mapping[str, ExpertsRule | str] | None = None,
) -> None:
    """Adds an adapter to layers of a model, which become :class:`LoRALinear` or
    :class:`LoRAEmbedding` if they are none, to modules of experts, which become
    :class:`LoRAExperts`, and copies of modules, which become :class:`TrainedCopy`. The adapter is
    the only one that is active, and all else is frozen.
    An embedding and an output head that have one weight get one adapter, or one copy, if both are
    named. Callers take back by ``all_or_nothing`` what an interrupted call has done.

    Args:
        model: holds the layers.
        wanted: the numbers of the adapter for each layer, by the name of the layer.
        name: of the adapter.
        dtype: of A and B.
        copied: names of modules of which the adapter trains a copy.
        stacks: the numbers for each stack of matrices, by the names of the module and the stack.
        rules: what experts compute, by the names of their modules.

    Raises:
        TypeError: a weight is a DTensor.
        ValueError: the name is taken or none; a weight is that of another module too, which is not
            named or is no head of an embedding, or is one that DoRA cannot read; an embedding and
            its head are to have different adapters; the model is itself such a layer; or a module
            to copy is none that can be trained as a whole.
    """
    held_in = nn.ModuleDict(), nn.ParameterDict()  # as attributes
    taken = isinstance(name, str) and any(hasattr(one, name) for one in held_in)
    if not isinstance(name, str) or not name or "." in name or taken:
        raise ValueError(f"name is {name!r}, wanted one that a module may have, without a dot")
    stacks, rules = stacks or {}, rules or {}
    places = [*dict.fromkeys([*wanted, *stacks, *copied])]
    modules: dict[str, Any] = {path: model.get_submodule(path) for path in places}
    if "" in modules:
        raise ValueError("the model is itself the layer: give a module that holds it")
    for path, one in modules.items():
        if isinstance(one, Switched) and name in one.names:
            raise ValueError(f"'{path}' has an adapter {name!r} already")
        for key, param in one.named_parameters():
            if isinstance(param, DTensor):
                raise TypeError(f"'{path}.{key}' is a DTensor: add adapters before fully_shard()")
    wholes = {path: modules[path] for path in copied}
    heads = tied_heads(model)
    for path, one in wholes.items():
        _check_copied(path, one, {*wanted, *stacks}, {*wholes, *switched(model)} - {path})
        _refuse_shared(model, path, one, one.parameters(), _tied(path, heads) & {*wholes})
    for path in wanted:
        # A weight that weight_norm or pruning computes is no parameter.
        weight = modules[path]._parameters.get("weight")
        params = [] if weight is None else [weight]
        _refuse_shared(model, path, modules[path], params, _tied(path, heads) & {*wanted})
    for path, adapters in stacks.items():
        params = [modules[path]._parameters.get(stack) for stack in adapters]
        _refuse_shared(model, path, modules[path], [p for p in params if p is not None], ())
    heads = {head: one for head, one in heads.items() if head in wanted}
    for head, embedding in heads.items():
        _check_tied(head, embedding, wanted[head], wanted[embedding])
    around: dict[str, Any] = {
        path: _around(one, path in wanted, rules.get(path) if path in stacks else None)
        for path, one in modules.items()
        if path not in heads
    }
    for head, embedding in heads.items():
        one = modules[head]
        tied = isinstance(one, LoRALinear)
        around[head] = one if tied else LoRALinear(one, around[embedding])
    for path, adapter in wanted.items():
        if adapter.dora:
            try:
                around[path].base_matrix()
            except ValueError as error:
                raise ValueError(f"'{path}': {error}") from None
    swaps = {id(modules[path]): one for path, one in around.items() if one is not modules[path]}
    replace(model, swaps)
    memo: dict[int, Any] = {}  # so that copies are tied as their modules are
    for path, one in around.items():
        if path in wanted or path in stacks:
            one.add_adapter(name, wanted[path] if path in wanted else stacks[path], dtype)
        else:
            one.add_adapter(name, memo)
    for param in model.parameters():
        param.requires_grad_(False)
    activate(model, [name])
    call_linears(model)


def _around(module: nn.Module, is_target: bool, rule: ExpertsRule | str | None = None) -> Any:
    """Returns what takes the place of a module, or the module itself if it has adapters already.

    Args:
        rule: what it computes, if its stacks get an adapter.
    """
    if isinstance(module, Switched):
        return module
    if isinstance(rule, ExpertsRule):
        return LoRAExperts(module, rule)
    if not is_target:
        return TrainedCopy(module)
    if is_embedding(module):
        return LoRAEmbedding(module)
    return LoRALinear(module) if takes_adapters(module) else LoRAWeight(module)


def _check_copied(path: str, module: nn.Module, targets: set[str], others: set[str]) -> None:
    """Raises where a module cannot be trained as a whole, by a copy.

    Args:
        path: its name.
        module: the module, or what holds copies of it already.
        targets: names of the layers that get A and B.
        others: names of other modules that have something of an adapter, or get it.
    """
    kind = type(module).__name__
    if isinstance(module, CONTAINERS) or not [*module.parameters()]:
        raise ValueError(f"'{path}' is a {kind}, which is never called or has no parameters")
    if not all(param.is_floating_point() for param in module.parameters()):
        raise ValueError(f"'{path}' has a weight in few bits, of which no copy can be trained")
    for other in targets | others:
        if is_in(path, other) or (is_in(other, path) and not isinstance(module, TrainedCopy)):
            raise ValueError(f"'{path}' is to train as a whole, and '{other}' has an adapter")
    if isinstance(module, (LoRALayer, LoRAExperts)):
        raise ValueError(f"'{path}' is to train as a whole, and has an adapter")


def _tied(path: str, heads: Mapping[str, str]) -> set[str]:
    return {*with_tied([path], heads)}


def _check_tied(head: str, embedding: str, mine: Adapter, other: Adapter) -> None:
    """Raises where an embedding and its head would not have the same sum of weight and adapter."""
    both = f"'{embedding}' and '{head}' have the same weight, and"
    if mine.dora:
        raise ValueError(
            f"{both} DoRA would train lengths of its columns for one and of its rows for the "
            "other: leave both out of an adapter with DoRA, or untie them"
        )
    if mine != other:
        raise ValueError(f"{both} would have different adapters, {other} and {mine}: untie them")


def _refuse_shared(
    model: nn.Module,
    path: str,
    module: nn.Module,
    params: Iterable[nn.Parameter],
    tied: Collection[str],
) -> None:
    """Raises where a parameter of a module is that of another one too, which would not have the
    adapter, because it is none of those that are tied to it."""
    if isinstance(module, Switched):
        return
    wanted = {id(param) for param in params}
    for other, one in model.named_modules():
        if is_in(other, path) or other in tied:
            continue
        if any(id(p) in wanted for p in one._parameters.values()):
            raise ValueError(
                f"'{path}' and '{other}' have the same weight, and an adapter would be that of the "
                "first alone: leave it out, or untie them"
            )
