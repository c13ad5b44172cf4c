"""Experts whose stacks of matrices PEFT has given adapters of LoRA (``target_parameters``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..nn.experts import (
    ExpertsRule,
    LowRankStack,
    QuantizedExperts,
    experts_computed,
    stack_shape,
)
from ..nn.fused import is_untouched
from ..nn.lora import joined
from .changes import patched_names


def param_wrappers(model: nn.Module) -> dict[nn.Module, list[Any]]:
    """Returns the modules whose parameters have adapters of PEFT, each with the wrappers around it,
    of one parameter each, from the outermost on."""
    found: dict[nn.Module, list[Any]] = {}
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper" and hasattr(module, "get_base_layer"):
            layer: Any = module
            found.setdefault(layer.get_base_layer(), []).append(module)
    return found


def wrapper_obstacle(wrappers: Sequence[Any], rule: ExpertsRule) -> str | None:
    """Returns why experts and the adapters that wrappers hold are left to PEFT, or None."""
    if isinstance(wrappers[0].get_base_layer(), QuantizedExperts):
        return "PEFT takes the codes of its stacks for matrices: give it adapters by headroom.lora"
    for one in wrappers:
        if one.parameter_name not in rule.stacks:
            return f"PEFT has given its {one.parameter_name} adapters"
        if "forward" in vars(one).keys() - patched_names(vars(one)):
            return "something else has replaced the forward of its adapters"
        # As PEFT 0.19.1 and later have it: A reads what an expert reads, however stacks lie.
        swapped = getattr(one, "_did_swap_in_out_features", rule.options["transposed"])
        if swapped is rule.options["transposed"]:
            return "its adapters are of a PEFT before 0.19.1, where A and B are transposed"
    return None


def peft_experts_forward(outer: Any, rule: ExpertsRule, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the forward of the outermost wrapper, which it calls where there is
    nothing to add, as with disabled or merged adapters, and where the op cannot compute it."""
    base = outer.get_base_layer()
    if is_untouched(base) and (adapters := _adapters(outer, rule)):
        y = experts_computed(base, rule, args, kwargs, adapters)
        if y is not None:
            return y
    return type(outer).forward(outer, *args, **kwargs)


def _adapters(outer: Any, rule: ExpertsRule) -> dict[str, LowRankStack] | None:
    """Returns the sum of the active adapters of each stack, or None where adapters compute more."""
    found: dict[str, LowRankStack] = {}
    layer, base = outer, outer.get_base_layer()
    while layer is not base:
        if layer.disable_adapters or layer.merged or not (layer is outer or is_untouched(layer)):
            return None
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        shape = stack_shape(base, rule, layer.parameter_name)
        parts = [_matrices(layer, name, shape) for name in names]
        known = [one for one in parts if one is not None]
        if len(known) < len(parts):
            return None
        if known:
            found[layer.parameter_name] = joined(known)
        layer = layer.base_layer
    return found


def _matrices(layer: Any, name: str, shape: tuple[int, int, int]) -> LowRankStack | None:
    """Returns A and B of an adapter by expert, of which PEFT has the rows of all A one behind
    another, and columns of B in turn; and its scale."""
    count, rows, cols = shape
    parts = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    a, b = (part.weight for part in parts[:2])
    is_plain = all(type(part) is nn.Linear and part.bias is None for part in parts[:2])
    if not is_plain or not all(map(is_untouched, parts)) or name in layer.lora_variant:
        return None
    if a.shape[1] != cols or b.shape[0] != rows:
        return None
    by_expert: Tensor = b.reshape(rows, -1, count).permute(2, 0, 1).contiguous()
    return a.view(count, -1, cols), by_expert, layer.scaling[name]
