"""Which experts of a model can have adapters, which of their stacks get one, and of which rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .._core.checks import check_count
from ..nn.bitsandbytes import scales_name
from ..nn.experts import ExpertsRule, QuantizedExperts
from ..nn.lora import Adapter
from ..nn.lora_experts import LoRAExperts, check_adapter
from ..nn.quantized import QuantizedLinear
from ..nn.switched import outside
from ..patching.experts import found_experts
from ..patching.peft_experts import param_wrappers
from ..quantizing.choice import EXPERTS, is_of_experts, joined
from .report import Unadapted

# What configs of transformers call the number of experts of a token.
CHOSEN = "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"

BITSANDBYTES = (
    "bitsandbytes has put its stacks into 4 bits: quantize the model by headroom.quantize, or let "
    "PEFT add the adapter and call headroom.patch"
)

Rules = Mapping[str, ExpertsRule | str]
Stacks = dict[str, dict[str, Adapter]]


def experts_in(model: nn.Module) -> dict[str, ExpertsRule | str]:
    """Returns the modules of experts of a model by name, each with its rule, or why it can have no
    adapters; those with adapters under the names that they have in the model."""
    rules, adapted = found_experts(model), param_wrappers(model)
    rules |= dict.fromkeys(rules.keys() & adapted.keys(), "it has adapters of PEFT")
    rules |= dict.fromkeys(filter(is_parametrized, rules), BITSANDBYTES)
    found = {path: rules.get(_base(module)) for path, module in outside(model)}
    return {path: rule for path, rule in found.items() if rule is not None}


def check_experts(experts: Any) -> None:
    """Refuses an ``experts`` of :func:`headroom.lora` that is neither a flag nor a rank."""
    if experts is not None and not isinstance(experts, bool):
        check_count("experts", experts, 1)


def stacks_of(rules: Rules) -> dict[str, tuple[str, str]]:
    """Returns the name of each stack in a model, and the name of its module and its own."""
    return {
        joined(path, stack): (path, stack)
        for path, rule in rules.items()
        if not isinstance(rule, str)
        for stack in rule.stacks
    }


def chosen_stacks(
    model: nn.Module,
    rules: Rules,
    experts: bool | int | None,
    named: list[str],
    adapter: Adapter,
) -> Stacks:
    """Returns the adapter of each stack that gets one, by the names of modules and of stacks.

    Args:
        model: has the experts.
        rules: what they compute.
        experts: of :func:`headroom.lora`.
        named: the stacks that ``targets`` mean; if there are none, all are meant where ``experts``
            are asked for.
        adapter: that of linear layers.

    Raises:
        ValueError: no experts of the model can have adapters, or they cannot have this one; or how
            many experts a token has is not known.
    """
    all_stacks = stacks_of(rules)
    if experts and not all_stacks:
        reasons = "; ".join(sorted({rule for rule in rules.values() if isinstance(rule, str)}))
        raise ValueError(
            f"experts is {experts}, but {type(model).__name__} has no experts that can have "
            f"adapters{f': {reasons}' if reasons else ''}"
        )
    found: Stacks = {}
    for name in named or (all_stacks if experts else ()):
        path, stack = all_stacks[name]
        rank = adapter.rank
        if experts is True:
            rank = max(1, rank // _experts_per_token(path, _base(model.get_submodule(path))))
        elif experts:
            rank = int(experts)
        alpha = adapter.alpha if rank == adapter.rank else adapter.alpha * rank / adapter.rank
        numbers = rank, alpha, adapter.dropout, adapter.rslora, adapter.dora
        found.setdefault(path, {})[stack] = Adapter(*numbers)
        check_adapter(found[path][stack])
    return found


def _experts_per_token(path: str, module: Any) -> int:
    config = getattr(module, "config", None)
    numbers = [getattr(config, name, None) for name in CHOSEN]
    count = next((n for n in numbers if isinstance(n, int) and n > 0), None)
    if count is None:
        raise ValueError(
            f"experts is True, but the config of '{path}' does not say how many experts a token "
            "has: give the rank of their adapters, such as experts=2"
        )
    return count


def left_experts(
    model: nn.Module, rules: Rules, stacks: Stacks, asked: bool, is_copied: Callable[[str], bool]
) -> list[Unadapted]:
    """Returns the parameters that hold matrices of experts and get no adapter, with the share that
    they have.

    Args:
        model: has them.
        rules: what experts compute.
        stacks: those that get one.
        asked: whether some experts get one.
        is_copied: says of the name of a module whether the adapter trains a copy of it.
    """
    found: dict[str, tuple[str, int, str]] = {}
    for path, module in outside(model):
        base, rule, chosen = _base(module), rules.get(path), stacks.get(path, {})
        numels = _numels(base)
        for name, param in base.named_parameters(recurse=False):
            if not is_of_experts(base, param) or name in chosen or is_copied(path):
                continue
            why = ""
            if isinstance(rule, ExpertsRule):
                if chosen and name not in rule.stacks:
                    continue  # a bias beside matrices with adapters
                why = ", as it is no target" if asked else ""
            elif asked and rule is not None:
                why = f", as {rule}"
            found[joined(path, name)] = type(base).__name__, numels[name], why
    many = sum(numel for _, numel, _ in found.values())
    whole = sum(
        {
            id(param): numel
            for module in model.modules()
            for param, numel in zip(module.parameters(recurse=False), _numels(module).values())
        }.values()
    )
    reason = f"{EXPERTS}, which get no adapter: {many:,} of {whole:,} parameters"
    return [Unadapted(name, was, reason + why) for name, (was, _, why) in found.items()]


def _numels(module: nn.Module) -> dict[str, int]:
    """Returns how many numbers the parameters of a module hold, by name: weights of few bits as
    many as were quantized, and their scales none."""
    found = {name: param.numel() for name, param in module.named_parameters(recurse=False)}
    if isinstance(module, QuantizedExperts):
        for name, q in zip(module.rule.stacks, module.stacks()):
            found |= {name: prod(q.shape), scales_name(name): 0}
    elif isinstance(module, QuantizedLinear):
        found |= {"weight": prod(module.matrix.shape), "scales": 0}
    return found


def _base(module: nn.Module) -> nn.Module:
    return module.base_layer if isinstance(module, LoRAExperts) else module
